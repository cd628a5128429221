"""The manifest of a job: one pydantic model per block. docs/manifest.md.

The entries of methods are in `manifests.methods`. Unknown fields, wrong types and impossible values are all reported at
once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from manifests.blocks import Count, Listed, Location, ManifestBlock, Share
from manifests.calibration import FORMER_LEAST_TOKENS, Calibration
from manifests.evaluation import Evaluation
from manifests.fit import Fit
from manifests.heal import Heal
from manifests.methods import FORMER_RIDGES, AnyMethod
from manifests.quantize import FORMER_CONSTANTS, ROUNDED_RIDGES, Quantize

MANIFEST_VERSION = 1
RANKS_ONLY = re.compile(  # fields of `Manifest.semantic` that change ranks and bits, but no measurement on text
    r"budget(\..*)?|quantize\.(bits|group|levels)|"
    r"methods\.\d+\.(keep|ranks|cache_keep|allocation|rank_multiple|skip_above)(\..*)?",
    re.ASCII,
)


class Model(ManifestBlock):
    """The dense model: a directory or a hub id; `revision` is the hub's.

    `trust_remote_code`: Python code of the checkpoint (`auto_map`) may run. Only a tokenizer can need it: models are
    always built by Lamina's own families. The code is copied to the output with all other files beside the weights,
    except the card, as it might read any of them.

    `accept_loss`: the job goes on where the dense model's loss on a text is more than 1.05 times ln(vocabulary), the
    loss of equal probabilities. Otherwise it stops there, because something was read wrongly. For models with random
    weights.
    """

    source: Location
    revision: str | None = None
    trust_remote_code: bool = False
    accept_loss: bool = False


class Budget(ManifestBlock):
    """The size of the compressed model, by one of four limits.

    `keep`: share of the stored numbers in `scope` that may remain; indices and second factors count.

    `bytes`: share of the bytes; codes and scales count where `quantize` asks for fewer bits (`keep` counts numbers
    before they are rounded).

    `max_loss`: the largest Kullback-Leibler divergence from the dense model, in nats per token, on calibration text
    beyond the samples. The job finds the smallest `keep` that meets it, to within 0.005. For methods with
    allocation: loss.

    `fit`: the memory of the device that will serve it. When the model is opened, what this memory leaves beside cache,
    activations and the engine becomes `bytes` of the whole model (of the routed experts with `scope: experts`).

    `scope: experts` counts the routed experts of mixtures alone, and nothing else is compressed.

    `keep` and `bytes` include the numbers of entries with a size of their own (`keep`, `ranks`, `cache_keep`).

    `multiple`: ranks and widths that a budget chooses are multiples of this, or whole; null: 16, or 1 below a hidden
    size of 1024. Tensor parallelism over n devices needs multiples of n, quantised caches of their group, often 64.

    `measure_layers`: after a first solve, the loss of some layers at a time is measured on calibration text beyond the
    samples, and ranks are chosen again by predictions that these measurements correct,
    [methods.md#measured-layers](methods.md#measured-layers). For methods with allocation: loss, beside `keep`, `bytes`
    or `fit`. null: true for dense models of 12 or more layers, whose entries have no `refine`, if the text has more
    than the samples; false in sweeps, and in run directories that were begun without it.
    """

    keep: Share | None = None
    bytes: Share | None = None
    max_loss: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    fit: Fit | None = None
    scope: Literal["decoder", "model", "experts"] = "decoder"
    multiple: Count | None = None
    measure_layers: bool | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = [name for name in ("keep", "bytes", "max_loss", "fit") if getattr(self, name) is not None]
        if self.measure_layers and limits not in (["keep"], ["bytes"], ["fit"]):
            raise ValueError("`measure_layers` chooses ranks of a given size: give `keep`, `bytes` or `fit` beside it")
        if len(limits) > 1:
            raise ValueError(f"give either `keep`, `bytes`, `max_loss` or `fit`, and not {' and '.join(limits)}")
        if not limits and self.multiple is None:
            raise ValueError(
                "give either `keep`, `bytes`, `max_loss` or `fit`; or `multiple` alone, beside entries with a size of "
                "their own"
            )
        return self

    @property
    def counts_bytes(self) -> bool:
        """True if the limit is a number of bytes."""
        return self.bytes is not None or self.fit is not None

    @property
    def share(self) -> float:
        """The share of numbers or bytes that may remain; 1 until `max_loss` has chosen a size."""
        return self.keep or self.bytes or 1.0


class Workers(ManifestBlock):
    """The number of workers (Ray actors) and the resources of each. Only `cpus` (threads of a worker) changes results.

    `max_failures`: the job ends when this many workers in a row have died on the same unit, or while starting.
    `start_timeout_s`: the job waits this long if no node has the resources of a worker and no autoscaler adds nodes, or
    if other processes occupy a node's memory.
    `cache_gb`: space on each node's local disk (TMPDIR) for tensors of a source in a bucket; the workers of a node
    fetch each tensor once for all passes.
    `min`: the job begins with this many, and takes more up to `max` as they start. `gpus`: of each worker, 1 or a share
    of one. `activation_memory_gb`: host memory of a worker for hidden states; the rest is in files.
    `experts`: a worker holds the weights and moments of this many experts of a layer at a time; the others follow.
    With `--in-process` the command itself is the only worker, without Ray, and `max` must be 1.
    """

    min: Annotated[int, Field(gt=0, le=100_000)] = 1
    max: Annotated[int, Field(gt=0, le=100_000)] = 1
    cpus: Annotated[int, Field(gt=0, le=4096)] = 1
    gpus: Annotated[float, Field(ge=0.0, le=1024.0, allow_inf_nan=False)] = 0
    max_failures: Count = 3
    start_timeout_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 600.0
    activation_memory_gb: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 8.0
    experts: Count = 8
    cache_gb: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        if self.gpus > 1:
            raise ValueError(f"gpus: {self.gpus}; a worker computes on one GPU: give 1 or a share, and more workers")
        return self


class Resume(ManifestBlock):
    """Hidden states are committed every `every` layers; after a crash, at most the layers since are computed again.

    With `statistics: {keep: false}`, and layers solved in the dense pass (docs/architecture.md), layers that are not
    written yet are computed again, too: up to three for each worker. Commits are then at least as far apart, at
    multiples of `every`.

    `auto`: the smallest number for which the plan predicts that commits take at most 5 % of the time, but no more than
    ten minutes of work. It is chosen when work in a run directory begins, and kept there. docs/plan.md#commits.
    """

    every: Count | Literal["auto"] = 1

    @field_validator("every", mode="before")
    @classmethod
    def _is_a_number_or_auto(cls, every: Any) -> Any:
        # A union would report each of its kinds as a fault.
        if every == "auto" or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
            return every
        raise ValueError("should be an integer greater than 0, or auto")


class Statistics(ManifestBlock):
    """`keep`: statistics are kept after their layer is solved; null: with propagate: dense, not with compressed."""

    keep: bool | None = None


class Manifest(ManifestBlock):
    """The whole job. Only `version`, `model`, `output`, `run_dir` and `methods` are always needed.

    `seed`: of the choice of samples and of every random number; another seed gives another output.
    """

    version: int
    model: Model
    output: Location
    run_dir: Location
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    budget: Budget | None = None
    calibration: Calibration | None = None
    quantize: Quantize | None = None
    heal: Heal | None = None
    methods: Annotated[tuple[AnyMethod, ...], Listed]
    workers: Workers = Workers()
    resume: Resume = Resume()
    statistics: Statistics = Statistics()
    evaluation: Evaluation = Evaluation()
    environment: Annotated[tuple[str, ...], Listed] = ()

    @field_validator("version")
    @classmethod
    def _version_is_ours(cls, version: int) -> int:
        if version != MANIFEST_VERSION:
            raise ValueError(f"this code reads manifests of version {MANIFEST_VERSION}, and no older or newer ones")
        return version

    @field_validator("methods")
    @classmethod
    def _has_a_method(cls, methods: tuple[AnyMethod, ...], info: ValidationInfo) -> tuple[AnyMethod, ...]:
        # Not min_length: it counts the entries that are right, and so reports a wrong entry twice.
        if not methods and info.data.get("quantize", "wrong") is None:
            raise ValueError("should list at least one method; or none, beside `quantize`")
        return methods

    @model_validator(mode="after")
    def _rounding_has_its_text(self) -> Self:
        if self.quantize is not None and self.quantize.feedback and self.calibration is None:
            raise ValueError(
                f"quantize.feedback: {str(self.quantize.feedback).lower()} needs calibration, because it measures the "
                "inputs of the weights on its text; leave it out to round to nearest"
            )
        return self

    @model_validator(mode="after")
    def _feedback_of_outputs_is_dense(self) -> Self:
        if self.quantize is not None and self.quantize.feedback == "both" and (why := self._unfit_for_both_sides()):
            raise ValueError(f"quantize.feedback: both follows gradients of the dense model{why}")
        return self

    @model_validator(mode="after")
    def _corrected_rounding_has_its_text(self) -> Self:
        if self.quantize is None or self.quantize.correct == "none":
            return self
        if self.calibration is None or self.calibration.propagate != "dense":
            raise ValueError(
                "quantize.correct: output passes calibration text through the dense and the rounded layers; give "
                "calibration, with propagate: dense"
            )
        return self

    def _unfit_for_both_sides(self) -> str | None:
        """Return why feedback on both sides does not fit the job, with the remedies; None if it fits."""
        if self.calibration is not None and self.calibration.propagate != "dense":
            return f"; set calibration.propagate: dense, not {self.calibration.propagate}, or feedback: true"
        if self.quantize is not None and self.quantize.correct != "none":
            return ", and quantize.correct: output rounds behind corrected layers; leave out one of them"
        for position, entry in enumerate(self.methods):
            if getattr(entry, "correct", "none") != "none" or entry.refine is not None:
                return (
                    f", and methods.{position} ({entry.method}) rounds behind its corrected or trained layers; use "
                    "feedback: true, or leave out correct and refine"
                )
        return None

    @model_validator(mode="after")
    def _bytes_are_countable(self) -> Self:
        if self.budget is not None and self.budget.counts_bytes and self.quantize and self.quantize.group is None:
            raise ValueError("budget.bytes counts a scale for each group; give quantize.group, or budget.keep")
        return self

    @model_validator(mode="after")
    def _chosen_bits_have_a_budget(self) -> Self:
        if self.quantize is None or self.quantize.bits != "auto":
            return self
        if self.budget is None or not self.budget.counts_bytes:
            raise ValueError("quantize.bits: auto chooses within a size; give budget.bytes")
        if self.calibration is None or self.calibration.propagate != "dense":
            raise ValueError("quantize.bits: auto follows predicted loss; give calibration with propagate: dense")
        for position, entry in enumerate(self.methods):
            if not entry.follows_curves or entry.keep is not None:
                raise ValueError(
                    f"quantize.bits: auto chooses bits and ranks together; methods.{position} ({entry.method}) needs "
                    "allocation: loss, and no `keep` of its own"
                )
        return self

    @model_validator(mode="after")
    def _a_size_has_its_methods(self) -> Self:
        if not self.methods and self.budget is not None and self.budget.keep not in (None, 1.0):
            raise ValueError(
                "methods: [] removes no numbers, so that budget.keep has no effect; leave it out, or give budget.bytes"
            )
        return self

    @property
    def rank_multiple(self) -> int | None:
        """The default multiple of ranks: a common multiple of the budget's `multiple` and of the groups of scales."""
        multiple, group = self.budget.multiple if self.budget else None, self.quantize.group if self.quantize else None
        return math.lcm(multiple or 1, group or 1) if multiple or group else None

    @property
    def rounding(self) -> Quantize | None:
        """`quantize` with the feedback that null stands for: none without calibration text; on both sides where uniform
        codes have fewer than 8 bits and a method measures the loss's gradients on the dense model anyway; else of
        inputs."""
        if self.quantize is None or self.quantize.feedback is not None:
            return self.quantize
        if self.calibration is None:
            return self.quantize.model_copy(update={"feedback": False})
        coarse = self.quantize.levels == "uniform" and self.quantize.bits != 8
        pays = coarse and any(entry.needs_gradient for entry in self.methods)
        feedback: Literal["both", True] = "both" if pays and self._unfit_for_both_sides() is None else True
        return self.quantize.model_copy(update={"feedback": feedback})

    @property
    def rounds_by_feedback(self) -> bool:
        """True if stored weights are rounded with error feedback on calibration text."""
        return self.rounding is not None and self.rounding.feedback is not False

    @model_validator(mode="after")
    def _gradient_has_its_text(self) -> Self:
        for position, entry in enumerate(self.methods):
            where = f"methods.{position} ({entry.method})"
            if entry.needs_gradient and self.calibration is None:
                raise ValueError(f"{where} follows the model's loss on text, so that calibration is needed")
            if entry.needs_gradient and self.calibration and self.calibration.propagate != "dense":
                raise ValueError(
                    f"{where} follows statistics of the dense model; set calibration.propagate: dense, "
                    f"not {self.calibration.propagate}"
                )
        return self

    @model_validator(mode="after")
    def _healing_has_its_text(self) -> Self:
        if self.heal is not None and self.heal.text is None and self.calibration is None:
            raise ValueError("heal trains on text, and the job has no calibration; give heal.text")
        return self

    @model_validator(mode="after")
    def _refinement_has_its_text(self) -> Self:
        asking = [(at, entry) for at, entry in enumerate(self.methods) if entry.refine is not None]
        for position, entry in asking:
            where = f"methods.{position} ({entry.method}).refine"
            if self.calibration is None:
                raise ValueError(f"{where} trains layers on calibration text; give calibration")
            if self.calibration.propagate != "dense":
                raise ValueError(
                    f"{where} begins with layers that are solved on the dense model; set calibration.propagate: dense"
                )
            if self.calibration.samples < 2:
                raise ValueError(f"{where} needs held-out samples; give calibration.samples: 2 or more")
            if entry.refine != asking[0][1].refine:
                raise ValueError(f"{where} differs from that of methods.{asking[0][0]}; a layer is refined once")
        corrected = any(getattr(entry, "correct", "none") != "none" for entry in (*self.methods, self.quantize))
        if corrected and (apart := {entry.refine.inputs for _, entry in asking if entry.refine} - {"compressed"}):
            raise ValueError(
                f"refine: inputs: {apart.pop()} trains each layer independently, but correct: output follows "
                "the layers before; leave out one of them"
            )
        return self

    @property
    def measures_layers(self) -> bool:
        """True if ranks are chosen again by measured losses of layers."""
        return self.budget is not None and bool(self.budget.measure_layers)

    @property
    def measures_unrounded(self) -> bool:
        """True if layers are measured before they are rounded: predicted losses of given bits are of ranks alone."""
        return self.measures_layers and self.quantize is not None and self.quantize.bits != "auto"

    def semantic(self) -> dict[str, Any]:
        """Return the fields that change the output's bytes; the fingerprint covers them.

        Paths and evaluation change nothing, healing follows the solve, and `budget.fit` has become `budget.bytes`. The
        calibration text is covered by its token ids, so that files may move.
        """
        unset = () if self.measures_layers else ("measure_layers",)  # which earlier versions did not have
        fields = self.model_dump(
            mode="json",
            include={"version", "seed", "budget", "calibration", "methods", "quantize"},
            exclude={"calibration": {"text"}, "budget": {"fit", *unset}},
        )
        if self.rounding is not None:
            fields["quantize"]["feedback"] = self.rounding.feedback
        if self.quantize is not None and self.quantize.correct == "none":
            fields["quantize"]["correct_ridges"] = [*ROUNDED_RIDGES]  # a value that is not used changes nothing
        fields["workers"] = {"cpus": self.workers.cpus}
        return fields


def completed(semantic: Any) -> Any:
    """Complete `Manifest.semantic` of an older version: missing fields get their defaults, ranks multiples of 1.

    `calibration.prefix` stays missing, because the samples of older versions had no prefix. Rounding with error
    feedback, the backward pass and corrections get the constants that they had before these were fields, and
    `feedback: null` what it meant before it could mean both sides. A value that no version of the schema can have
    written is returned unchanged.
    """
    if not isinstance(semantic, Mapping):
        return semantic
    places: dict[str, Any] = {"model": {"source": "-"}, "output": "-", "run_dir": "-"}
    fields = {**semantic, **places}
    if isinstance(calibration := fields.get("calibration"), Mapping):
        gradient = {"least_tokens": FORMER_LEAST_TOKENS, **calibration.get("gradient", {})}
        fields["calibration"] = {**calibration, "text": {"files": ["-"]}, "gradient": gradient}
        if isinstance(quantize := fields.get("quantize"), Mapping) and quantize.get("feedback") is not False:
            fields["quantize"] = {**FORMER_CONSTANTS, **quantize, "feedback": quantize.get("feedback") or True}
    if isinstance(methods := fields.get("methods"), Sequence):
        fields["methods"] = [
            {"correct_ridges": FORMER_RIDGES, **entry}
            if isinstance(entry, Mapping) and entry.get("method") == "loss_aware"
            else entry
            for entry in methods
        ]
    try:
        complete = Manifest.model_validate_json(json.dumps(fields)).semantic()
    except ValueError:
        return semantic
    methods = [
        entry if "rank_multiple" in old else {**entry, "rank_multiple": 1}
        for old, entry in zip(semantic["methods"], complete["methods"], strict=True)
    ]
    completed_fields = {**complete, "methods": methods}
    if isinstance(calibration, Mapping) and "prefix" not in calibration:
        del completed_fields["calibration"]["prefix"]
    return completed_fields
