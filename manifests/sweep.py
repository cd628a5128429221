"""A sweep compares methods and sizes on one model, from one calibration. docs/sweep.md.

Its fields are the manifest's, with `points` in place of `methods` and `budget`. Each point becomes a manifest that
`pipeline.run` would accept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator

from manifests.blocks import Count, Listed, Location, ManifestBlock, Share
from manifests.calibration import Calibration
from manifests.errors import InputError
from manifests.evaluation import Evaluation
from manifests.heal import Heal
from manifests.loading import decode_resolved, describe_faults, expand_environment, read_document
from manifests.methods import AnyMethod
from manifests.quantize import FORMER_CONSTANTS, Quantize
from manifests.schema import Manifest, Model, Resume, Workers

SWEEP_VERSION = 1
OWN_JOB = "run it as a job of its own with `python -m pipeline.run`"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]
Sizes = Annotated[tuple[Share, ...] | None, Listed]


class Points(ManifestBlock):
    """A list of methods, compared at every size and with every rounding: one point for each pair of them.

    `name`: in tables and names of outputs; null: the names of the methods. `keep` or `bytes`: sizes, as in `budget`;
    null: the sweep's `keep`; an empty list if the methods have sizes or ranks of their own. `quantize`: blocks as in
    the manifest; null among them means unrounded. `save`: sizes whose checkpoints are kept, under `output`; or `all`.
    """

    name: Name | None = None
    methods: Annotated[tuple[AnyMethod, ...], Listed]
    keep: Sizes = None
    bytes: Sizes = None
    quantize: Annotated[tuple[Quantize | None, ...], Listed] = (None,)
    save: str | tuple[float, ...] = ()

    @field_validator("save", mode="before")
    @classmethod
    def _saves_sizes(cls, save: Any) -> Any:
        if save == "all" or (isinstance(save, list | tuple) and all(type(size) in (int, float) for size in save)):
            return save if save == "all" else tuple(map(float, save))
        raise ValueError("should be a list of sizes, or all")

    @property
    def title(self) -> str:
        """The name, by default made of the names of the methods."""
        return self.name or "+".join(entry.method for entry in self.methods) or "rounded"


class Sweep(ManifestBlock):
    """Many methods, sizes and roundings of one model, from one calibration and one pool of workers.

    `keep`: the sizes of points without sizes of their own. `scope` and `multiple` apply to every budget. Checkpoints of
    saved points go to `output/NAME-SIZE`; statistics, ledger and results go to `run_dir`. `heal`: saved points are
    healed, each by itself; points that are only scored are not.
    """

    version: int
    model: Model
    output: Location
    run_dir: Location
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    keep: Annotated[tuple[Share, ...], Listed] = ()
    scope: Literal["decoder", "model", "experts"] = "decoder"
    multiple: Count | None = None
    calibration: Calibration | None = None
    heal: Heal | None = None
    points: Annotated[tuple[Points, ...], Listed]
    workers: Workers = Workers()
    resume: Resume = Resume()
    evaluation: Evaluation = Evaluation()
    environment: Annotated[tuple[str, ...], Listed] = ()

    @field_validator("version")
    @classmethod
    def _version_is_ours(cls, version: int) -> int:
        if version != SWEEP_VERSION:
            raise ValueError(f"this code reads sweeps of version {SWEEP_VERSION}, and no older or newer ones")
        return version

    @field_validator("calibration")
    @classmethod
    def _walks_the_dense_model(cls, calibration: Calibration | None) -> Calibration | None:
        if calibration is not None and calibration.propagate != "dense":
            raise ValueError(
                f"propagate: {calibration.propagate} sums statistics behind the compressed layers of one size, so that "
                f"points cannot share a pass over the text; {OWN_JOB}, or set it to dense"
            )
        if calibration is not None and calibration.chooses_samples:
            raise ValueError(f"samples: auto is chosen by a job; {OWN_JOB}, or give a number")
        return calibration

    @field_validator("evaluation")
    @classmethod
    def _scores_layers(cls, evaluation: Evaluation) -> Evaluation:
        if evaluation.whole_model:
            raise ValueError(
                "whole_model needs a checkpoint, and most points write none; leave it out: tasks are scored layer by "
                "layer, or name points in `save` and give their outputs to `python -m pipeline.evaluate --whole-model`"
            )
        return evaluation


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep, as the job that it would be by itself.

    Attributes:
        label: its name in tables, plots and outputs: `NAME-SIZE-ROUNDING`, without the parts that it lacks.
        series: common to the points that differ only in size and rounding.
        rounding: `int4` and the like, with the group if it is not 32; empty if unrounded.
        save: its checkpoint is kept.
    """

    label: str
    series: str
    rounding: str
    manifest: Manifest
    save: bool


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Sweep, tuple[SweepPoint, ...]]:
    """Read a sweep, apply overrides (`a.b=value`, values in YAML), and check it and every point as a manifest.

    Raises:
        InputError: the file is missing or not YAML, or has no points; or a list of all wrong fields.
    """
    document = read_document(path, overrides, "sweep")
    if "points" not in document:
        raise InputError(
            f"sweep {path}: has no `points`; a manifest without them is one job, which the command `run` runs"
        )
    return parse_sweep(document, str(path))


def decode_sweep(content: bytes, path: str) -> Sweep:
    """Parse the sweep of a run directory, from the bytes of the file `path`. Raises InputError."""
    return parse_sweep(decode_resolved(content, f"sweep {path}"), path)[0]


def decode_points(content: bytes, path: str) -> tuple[SweepPoint, ...]:
    """Parse the points of the sweep of a run directory. Raises InputError."""
    return parse_sweep(decode_resolved(content, f"sweep {path}"), path)[1]


def parse_sweep(document: Mapping[str, Any], origin: str = "sweep") -> tuple[Sweep, tuple[SweepPoint, ...]]:
    """Check a document. Raises InputError with one line for every fault."""
    expanded, faults = expand_environment(document, f"sweep {origin}")
    points: list[SweepPoint] = []
    try:
        sweep = Sweep.model_validate(expanded)
    except ValidationError as error:
        faults += describe_faults(error, Sweep)
        if "methods" in document and "points" not in document:
            faults.insert(0, "  without `points` it is one job: `python -m pipeline.run` runs it")
    else:
        points, wrong = _expand(sweep)
        faults += wrong
    if faults:
        raise InputError(f"sweep {origin}:\n" + "\n".join(faults))
    return sweep, tuple(points)


def _expand(sweep: Sweep) -> tuple[list[SweepPoint], list[str]]:
    """Return every point, and a line for each fault."""
    points: list[SweepPoint] = []
    faults: list[str] = [] if sweep.points else ["  points: should list at least one"]
    for position, entry in enumerate(sweep.points):
        try:
            sizes = _sizes(sweep, entry)
        except ValueError as error:
            faults.append(f"  points.{position}: {error}")
            continue
        wrong: dict[str, None] = {}  # keys, as most faults occur at every size
        for (kind, size), quantize in product(sizes, entry.quantize):
            rounding = _rounding(quantize)
            label = "-".join(part for part in (entry.title, f"{size:g}" if size else "", rounding) if part)
            save = entry.save == "all" or size in entry.save
            try:
                manifest = _manifest(sweep, entry, kind, size, quantize, label, sweep.heal if save else None)
            except ValidationError as error:
                wrong |= dict.fromkeys(describe_faults(error))
                continue
            points.append(SweepPoint(label, entry.title, rounding, manifest, save))
        faults += [f"  points.{position}: {line.strip()}" for line in wrong]
    for label, count in Counter(point.label for point in points).items():
        if count > 1:
            faults.append(f"  points: {count} are called {label}; give `name`s, and each size once")
    if sweep.heal is not None and points and not any(point.save for point in points):
        faults.append("  heal: trains saved points, and no point is saved; name sizes in `save`, or leave out heal")
    return points, faults


def _sizes(sweep: Sweep, entry: Points) -> list[tuple[str, float | None]]:
    """Return (`keep` or `bytes`, share) for each size; (`keep`, None) if no budget applies."""
    if not entry.quantize:
        raise ValueError("quantize: should list at least one block, or null")
    if entry.keep is not None and entry.bytes is not None:
        raise ValueError("give either `keep` or `bytes`; for both, write two points")
    kind = "bytes" if entry.bytes is not None else "keep"
    sizes = next(sizes for sizes in (entry.bytes, entry.keep, sweep.keep) if sizes is not None)
    unknown = [] if isinstance(entry.save, str) else sorted(set(entry.save) - set(sizes))
    if unknown:
        shown = ", ".join(f"{size:g}" for size in sizes) or "of which it has none; set it to all"
        raise ValueError(f"save: {unknown[0]:g} is not among its sizes, {shown}")
    return [(kind, size) for size in sizes] or [(kind, None)]


def _manifest(
    sweep: Sweep,
    entry: Points,
    kind: str,
    size: float | None,
    quantize: Quantize | None,
    label: str,
    heal: Heal | None,
) -> Manifest:
    """Return the manifest of a point. Raises ValidationError."""
    budget: dict[str, Any] = {"scope": sweep.scope, "multiple": sweep.multiple}
    limit = budget | {kind: size} if size else budget if sweep.multiple else None
    return Manifest.model_validate(
        {
            "version": 1,
            "model": sweep.model,
            "output": f"{sweep.output.rstrip('/')}/{label}",
            "run_dir": sweep.run_dir,
            "seed": sweep.seed,
            "budget": limit,
            "calibration": sweep.calibration,
            "quantize": quantize,
            "heal": heal,
            "methods": entry.methods,
            "workers": sweep.workers,
            "resume": sweep.resume,
            "evaluation": sweep.evaluation,
        }
    )


def _rounding(quantize: Quantize | None) -> str:
    if quantize is None:
        return ""
    group = "" if quantize.group == 32 else f"g{quantize.group}" if quantize.group else "row"
    skipped = "".join(f"-{role}" for role in quantize.skip)
    levels = "" if quantize.levels == "uniform" else f"-{quantize.levels}"
    levels += "-both" if quantize.feedback == "both" else ""
    levels += "-corrected" if quantize.correct == "output" else ""
    own = {name: getattr(quantize, name) for name in FORMER_CONSTANTS}
    constants = "".join(
        f"-{name}{value:g}" for name, value in own.items() if value != Quantize.model_fields[name].default
    )
    return (f"int{quantize.bits}" if quantize.bits != "auto" else "bits") + levels + group + skipped + constants
