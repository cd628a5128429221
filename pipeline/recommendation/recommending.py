"""Recommends the manifest of a job from the model, the text and the machines, and plans the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from manifests.calibration import Text
from manifests.engines import Engine
from manifests.errors import InputError
from manifests.fit import Fit, memory_text
from manifests.loading import decode_document, parse_block, parse_manifest
from manifests.quantize import Quantize
from manifests.schema import Manifest, Workers
from pipeline.checkpoint.engines import planned_config, planned_engines, planned_lines, planned_refusals
from pipeline.checkpoint.planned_size import bounded_plan
from pipeline.families.foreign import sequence_limit
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.fitting import DoesNotFitError, check_context, least_measured, shown_bytes
from pipeline.inputs.job_inputs import Inputs, layer_dtype, read_inputs
from pipeline.inputs.sources import open_dense
from pipeline.job.plan_report import RateSource, plan_report, serving_line
from pipeline.recommendation.commented_manifest import JobPlaces, commented_manifest
from pipeline.recommendation.nodes import Node, cluster_nodes, this_machine
from pipeline.recommendation.recipes import Recipe, RecipeChoice, choose_recipe, recipes
from pipeline.recommendation.settings import ACTIVATION_GB, USUAL_SHARE, Goal, Settings, choose_settings
from pipeline.recommendation.text_use import TextUse, choose_text_use, text_remarks
from pipeline.recommendation.verdict import Verdict
from pipeline.rounding.tasks import unfit_inputs
from stores.corpus import load_tokenizer

DRIVER_BYTES = 2 * 2**30  # reserved for the driver if it shares a machine with workers
FITS_WORDS = "--fits", "a shorter --context or fewer --sequences"  # of the error that a memory is too little


@dataclass(frozen=True)
class Request:
    """The arguments of the command.

    Attributes:
        goal: the size or the loss to reach; None for the usual one, which follows from the source.
        folder: the folder of the manifest, the output and the run directory.
        engine: the engine that will load the output; None: any.
    """

    model: str
    text: Text
    goal: Goal | None
    folder: str
    address: str | None = None
    connect_timeout_s: float = 30.0
    engine: Engine | None = None


def recommend(request: Request, command: str) -> tuple[str, Verdict]:
    """Return the manifest, as commented YAML, and the plan's verdict on it. Reads the model's headers alone.

    Raises InputError about the model, the text, the goal or the cluster.
    """
    source, config = open_dense(request.model, weights=False)
    if request.goal and request.goal.fit:
        check_context(request.goal.fit, config, "--context")
    tokenizer = load_tokenizer(source.storage)
    geometry = geometry_of(config)
    longest, channels = sequence_limit(config)[1], _channels(geometry)
    use, read = choose_text_use(request.text, tokenizer, longest, channels, geometry.vocab)
    asked = request.goal or usual_goal(bool(source.stored_bytes()))
    places, goal = _places(request, asked), _fitted(asked, geometry, request.engine)

    def inputs_of(goal: Goal, settings: Settings) -> Inputs:
        """Check the manifest for this goal, with these settings."""
        manifest = _parsed(commented_manifest(command, places, goal, settings))
        return read_inputs(manifest, weights=False)

    sized = geometry_of(config, 8 * layer_dtype(source, geometry).itemsize)
    choice = _choose(goal, sized, partial(inputs_of, settings=_trial_settings(use))) if goal.fit else None
    goal = goal if choice is None else replace(goal, recipe=choice.recipe)
    settings = choose_settings(use, _nodes(request), lambda settings: bounded_plan(inputs_of(goal, settings)))
    text = commented_manifest(command, places, goal, settings)
    manifest = _parsed(text)
    inputs = read_inputs(manifest, weights=False)
    stays_stored = bool(inputs.source.stored_bytes()) and not manifest.quantize
    _refuse_engine(request.engine, planned_config(inputs), stays_stored)
    rates = RateSource(None, None, request.address is not None, request.address, request.connect_timeout_s)
    report = plan_report(manifest, None, rates)
    engines = planned_engines(planned_config(inputs), stays_stored)
    serving, chosen = planned_lines(inputs) if request.engine else (), _choice_lines(choice, report)
    verdict = Verdict(report, goal, engines, text_remarks(tokenizer, read), serving, chosen)
    return text, verdict


def _trial_settings(use: TextUse) -> Settings:
    """Return settings for checks that do not depend on them."""
    return Settings(use, shards=1, micro_batch=1, workers=1, cpus=1, gpus=0, activation_gb=ACTIVATION_GB)


def _choose(goal: Goal, geometry: Geometry, inputs_of: Callable[[Goal], Inputs]) -> RecipeChoice:
    """Choose the recipe for a memory. Raises InputError if nothing fits, or the model fits as it is."""
    fit = goal.fit
    assert fit is not None
    hardly = fit.model_copy(update={"memory": 1})
    least = least_measured(geometry)

    def checked(recipe: Recipe, in_hardly_any: bool) -> Inputs:
        """Check the job of a recipe, which may not leave less of the layers than was measured."""
        try:
            inputs = inputs_of(replace(goal, recipe=recipe, fit=hardly if in_hardly_any else fit))
        except DoesNotFitError as error:
            raise DoesNotFitError(error.memory, max(error.least_bytes, least), *FITS_WORDS) from error
        if inputs.serving is not None and inputs.serving.weight_bytes < least:
            raise DoesNotFitError(inputs.serving, least, *FITS_WORDS)
        return inputs

    rounds = not any("." in role for role in goal.unrounded)  # else no group fits the experts
    candidates = recipes(fit, geometry.bits, rounds, not goal.uncorrected, goal.mixture)
    choice = choose_recipe(candidates, checked)
    if choice.better is not None:
        return choice
    inputs = checked(choice.recipe, False)
    assert inputs.serving is not None
    needed = inputs.serving.needed(inputs.source_bytes)
    if needed <= fit.memory:
        raise InputError(
            f"--fits {memory_text(fit.memory)}: the model fits as it is, in {shown_bytes(needed, up=True)}; there is "
            "nothing to compress: ask for less memory, a longer --context or more --sequences, or give --bytes"
        )
    return replace(choice, better=("the model as it is", needed))


def _choice_lines(choice: RecipeChoice | None, report: Mapping[str, Any]) -> tuple[str, ...]:
    if choice is None:
        return ()
    return (f"chose  {choice.recipe.label}: {serving_line(report['serving'])}", f"next   {choice.line()}")


def _nodes(request: Request) -> list[Node]:
    if request.address is None:
        return this_machine(DRIVER_BYTES)
    return cluster_nodes(request.address, request.connect_timeout_s)


def _fitted(goal: Goal, geometry: Geometry, engine: Engine | None) -> Goal:
    """Return the goal with this model's limits: why it has no corrections, and the roles that cannot be rounded.

    Raises InputError for a goal of bytes if experts have widths that no group of scales fits.
    """
    mixture = any(layer.num_experts for layer in geometry.layers)
    goal = replace(goal, uncorrected=_uncorrected(geometry), engine=engine, mixture=mixture, widest=_channels(geometry))
    if goal.field not in ("bytes", "fit"):
        return goal
    unfit = dict(unfit_inputs(Quantize(bits="auto"), geometry))
    if goal.fit is not None:
        return replace(goal, unrounded=tuple(unfit))
    if experts := [f"{role} reads {width} numbers" for role, width in unfit.items() if "." in role]:
        raise InputError(f"--bytes: no group of scales fits the experts ({experts[0]}); give --keep")
    return replace(goal, unrounded=tuple(unfit))


def _uncorrected(geometry: Geometry) -> str:
    """Return why the layers of a model have no corrections; an empty text if they have some."""
    if any(block.weighed for layer in geometry.layers for block in layer.mlps):
        return "the router weighs the inputs of experts"
    most, held = max(layer.num_experts for layer in geometry.layers), Workers.model_fields["experts"].default
    return f"a worker would have to hold all {most} experts of a layer" if most > held else ""


def _channels(geometry: Geometry) -> int:
    return max((block.width for layer in geometry.layers for block in layer.mlps), default=geometry.hidden)


def _places(request: Request, goal: Goal) -> JobPlaces:
    name = PurePath(request.model.rstrip("/")).name or "model"
    output = str(PurePath(request.folder, f"{name}-{goal.label}"))
    return JobPlaces(request.model, request.text, output, f"{output}.run")


def _parsed(text: str) -> Manifest:
    origin = "recommended"
    return parse_manifest(decode_document(text.encode(), origin), origin)


def _refuse_engine(engine: Engine | None, config: Mapping[str, Any], stays_stored: bool) -> None:
    """Raise InputError if an engine loads no compressed checkpoint of this model."""
    if engine and (reason := planned_refusals(config, stays_stored).get(engine)):
        possible = ", ".join(planned_engines(config, stays_stored))
        raise InputError(f"--for {engine}: it will not load the output: {reason}; these will: {possible}")


def usual_goal(stored: bool) -> Goal:
    """Return the goal of a user who gives none. Weights in a stored format would grow with fewer numbers in 16 bits."""
    return Goal("bytes" if stored else "keep", USUAL_SHARE)


def check_goal(
    keep: float | None, num_bytes: float | None, max_loss: float | None, fit: Mapping[str, Any] | None = None
) -> Goal | None:
    """Return the goal that the options give; None if they give none. Raises InputError for an impossible value.

    `fit`: the fields of `budget.fit` that are given.
    """
    if fit is not None:
        block = parse_block(Fit, fit, "--fits, --context, --sequences, --for, --on")
        return Goal("fit", block.memory, fit=block)
    if max_loss is not None:
        if not 0 < max_loss < float("inf"):
            raise InputError(f"--max-loss {max_loss:g}: expected nats per token above 0, such as 0.02")
        return Goal("max_loss", max_loss)
    share = num_bytes if num_bytes is not None else keep
    if share is None:
        return None
    field = "bytes" if num_bytes is not None else "keep"
    if not 0 < share <= 1:
        raise InputError(f"--{field} {share:g}: expected a share above 0 and at most 1, such as 0.8")
    return Goal("bytes" if field == "bytes" else "keep", share)
