"""Recommends the manifest of a job from the model, the text and the machines, and plans the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from manifests.calibration import Text
from manifests.engines import Engine
from manifests.errors import InputError
from manifests.loading import decode_document, parse_manifest
from manifests.quantize import Quantize
from manifests.schema import Manifest, Workers
from pipeline.checkpoint.engines import planned_config, planned_engines, planned_lines, planned_refusals
from pipeline.checkpoint.planned_size import bounded_plan
from pipeline.cost_model.estimate import Plan
from pipeline.families.foreign import sequence_limit
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.job_inputs import read_inputs
from pipeline.inputs.sources import open_dense
from pipeline.job.plan_report import RateSource, plan_report
from pipeline.recommendation.commented_manifest import Places, commented_manifest
from pipeline.recommendation.nodes import Node, cluster_nodes, this_machine
from pipeline.recommendation.settings import USUAL_SHARE, Goal, Settings, choose_settings
from pipeline.recommendation.text_use import choose_text_use, text_remarks
from pipeline.recommendation.verdict import Verdict
from pipeline.rounding.tasks import unfit_inputs
from stores.corpus import load_tokenizer

DRIVER_BYTES = 2 * 2**30  # reserved for the driver if it shares a machine with workers


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
    tokenizer = load_tokenizer(source.storage)
    geometry = geometry_of(config)
    longest, channels = sequence_limit(config)[1], _channels(geometry)
    use, read = choose_text_use(request.text, tokenizer, longest, channels, geometry.vocab)
    asked = request.goal or usual_goal(bool(source.stored_bytes()))
    places, goal = _places(request, asked), _fitted(asked, geometry, request.engine)

    def manifest_of(settings: Settings) -> Manifest:
        """Return the manifest with these settings."""
        return _parsed(commented_manifest(command, places, goal, settings))

    def plan(settings: Settings) -> Plan:
        """Return the plan of a job with these settings."""
        return bounded_plan(read_inputs(manifest_of(settings), weights=False))

    settings = choose_settings(use, _nodes(request), plan)
    manifest = manifest_of(settings)
    inputs = read_inputs(manifest, weights=False)
    stays_stored = bool(inputs.source.stored_bytes()) and not manifest.quantize
    _refuse_engine(request.engine, planned_config(inputs), stays_stored)
    rates = RateSource(None, None, request.address is not None, request.address, request.connect_timeout_s)
    report = plan_report(manifest, None, rates)
    engines = planned_engines(planned_config(inputs), stays_stored)
    verdict = Verdict(
        report, goal, engines, text_remarks(tokenizer, read), planned_lines(inputs) if request.engine else ()
    )
    return commented_manifest(command, places, goal, settings), verdict


def _nodes(request: Request) -> list[Node]:
    if request.address is None:
        return this_machine(DRIVER_BYTES)
    return cluster_nodes(request.address, request.connect_timeout_s)


def _fitted(goal: Goal, geometry: Geometry, engine: Engine | None) -> Goal:
    """Return the goal with this model's limits: why it has no corrections, and the roles that cannot be rounded.

    Raises InputError for a goal of bytes if experts have widths that no group of scales fits.
    """
    mixture = any(layer.num_experts for layer in geometry.layers)
    goal = replace(goal, uncorrected=_uncorrected(geometry), engine=engine, mixture=mixture)
    if goal.field != "bytes":
        return goal
    unfit = dict(unfit_inputs(Quantize(bits="auto"), geometry))
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


def _places(request: Request, goal: Goal) -> Places:
    name = PurePath(request.model.rstrip("/")).name or "model"
    output = str(PurePath(request.folder, f"{name}-{goal.label}"))
    return Places(request.model, request.text, output, f"{output}.run")


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


def check_goal(keep: float | None, num_bytes: float | None, max_loss: float | None) -> Goal | None:
    """Return the goal that the options give; None if they give none. Raises InputError for an impossible value."""
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
