"""The bytes and operations of a job, from its manifest and geometry.

docs/architecture.md#the-way-of-a-layer.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, T calibration tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from manifests.schema import Manifest
from pipeline.cost_model.bounds import Size, bounded_by, size_bound
from pipeline.cost_model.memory import (
    layer_bytes,
    moment_bytes,
    part_bytes,
    shared_bytes,
    solving_bytes,
    worker_peak,
)
from pipeline.cost_model.passes import PlannedPasses, planned_passes
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.reads import read_phases
from pipeline.cost_model.refinement_work import settings_of
from pipeline.cost_model.solve_work import solve_flops, solve_work
from pipeline.cost_model.vocabulary import TOKENIZER_BYTES, window_bytes
from pipeline.cost_model.work import forward_flops
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.experts.scores import FEW_TOKENS
from pipeline.methods.method import Moment, Task
from pipeline.methods.work import moment_width

DRIVER_BYTES = 600 * 2**20  # the driver's process, with the buffers in which it checks files
TOKEN_BYTES = 4
ONE_TEXT_KEEP = 0.7  # share of the experts' numbers below which one calibration text is too little


@dataclass(frozen=True)
class Plan:
    """Bytes and floating-point operations of a job, or upper bounds if they depend on the ranks.

    Attributes:
        read_phases: phase -> bytes read; `read_bytes` is their sum.
        output_bound: the manifest field that bounds `expected_numbers` and `output_bytes`; empty if they are exact.
    """

    layers: int
    claimed_layers: int
    layer_bytes: int
    source_bytes: int
    decoded_bytes: int
    read_bytes: int
    worker_peak_bytes: int
    worker_host_bytes: int
    worker_device_bytes: int
    driver_peak_bytes: int
    statistics_bytes_per_layer: int
    activation_bytes: int
    run_dir_bytes: int
    output_bytes: int
    output_bound: str
    expected_numbers: int
    dense_numbers: int
    forward_flops: float
    moment_flops: float
    solve_flops: float
    calibration_tokens: int
    workers: int
    read_phases: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """The kept share of the model's numbers, at most."""
        return self.expected_numbers / self.dense_numbers

    def report(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)


def make_plan(job: PlannedJob, itemsize: int, source_bytes: int, size: Size | None = None) -> Plan:
    """Plan a job. `itemsize`: bytes of a number in the forward pass. `size`: the checkpoint's exact size, if known."""
    manifest, geometry, tokens, calibration = job.manifest, job.geometry, job.tokens, job.manifest.calibration
    workers = min(manifest.workers.max, calibration.shards) if calibration else manifest.workers.max
    job = replace(job, tasks=[_with_samples_of(task, tokens) for task in job.tasks])
    passes = planned_passes(job)
    activations = tokens * geometry.hidden * itemsize
    statistics = [sum(moment_bytes(moment, layer) for moment in own.moments) for layer, own in job.claimed]
    bound = "" if size else bounded_by(job)
    size = size or size_bound(job, source_bytes)
    host, device = _worker_bytes(job, passes, itemsize, activations, workers)
    reads = read_phases(job, size, source_bytes, passes)
    models = _stored_models(manifest) * size.num_bytes
    models += max(0, size.numbers * itemsize - size.num_bytes) if manifest.measures_unrounded else 0
    inputs = job.gradient_tokens * geometry.hidden * itemsize * geometry.num_layers
    forward, moments, solves = _flops(job, passes)
    return Plan(
        layers=geometry.num_layers,
        claimed_layers=len(job.claimed),
        layer_bytes=max(each.num_bytes() for each in geometry.layers),
        source_bytes=source_bytes,
        decoded_bytes=source_bytes + geometry.saved_bytes("model"),
        read_bytes=sum(reads.values()),
        read_phases=reads,
        worker_peak_bytes=host + device,
        worker_host_bytes=host,
        worker_device_bytes=device,
        driver_peak_bytes=DRIVER_BYTES + (TOKENIZER_BYTES * geometry.vocab if calibration else 0) + tokens * 8,
        statistics_bytes_per_layer=max(statistics, default=0),
        activation_bytes=activations,
        run_dir_bytes=tokens * TOKEN_BYTES
        + _stored_states(manifest, workers) * activations
        + _stored_statistics(passes, statistics)
        + max(models, inputs),  # of the backward pass, which ends before layers are solved
        output_bytes=size.num_bytes,
        output_bound=bound,
        expected_numbers=size.numbers,
        dense_numbers=geometry.model_numbers(),
        forward_flops=forward,
        moment_flops=moments,
        solve_flops=solves,
        calibration_tokens=tokens,
        workers=workers,
    )


def _worker_bytes(
    job: PlannedJob, passes: PlannedPasses, itemsize: int, activations: int, workers: int
) -> tuple[int, int]:
    """Return a worker's peak of host and of device memory. `activations`: bytes of the hidden states of all samples."""
    manifest, geometry, solving = job.manifest, job.geometry, solving_bytes(job)
    summed = max((part_bytes(layer, own, manifest.workers.experts) for layer, own in job.claimed), default=0)
    if passes.in_pass:  # in memory at the same time: two layers of the pass, and the sums (triangles) of two layers
        solving += sum(layer_bytes(manifest, geometry, itemsize)) + summed
    sliced = geometry.streams(manifest.workers.experts)
    between = activations * (2 * itemsize + max(4, itemsize)) // itemsize if sliced else activations
    held_out, texts = window_bytes(manifest, geometry, workers)
    held = max(between // max(1, workers) + held_out, texts)
    host, device = worker_peak(job, itemsize, (summed, solving), held)
    if device == 0:
        host += shared_bytes(passes, summed, layer_bytes(manifest, geometry, itemsize)[0])
    if settings_of(manifest):
        host += min(2 * activations, int(manifest.workers.activation_memory_gb * 2**30))  # the targets
    return host, device


def _stored_states(manifest: Manifest, workers: int) -> int:
    """Return how often the hidden states of all samples are stored at a time.

    A refinement stores those of both models, and the targets of one layer, or of one layer per worker.
    """
    refined = settings_of(manifest)
    return 2 if refined is None else 6 if refined.inputs == "compressed" else 2 + 2 * workers


def _stored_statistics(passes: PlannedPasses, of_layers: Sequence[int]) -> int:
    """Return the bytes of the moments that are stored at a time: of all layers, or of the largest one."""
    return sum(of_layers) if passes.stores else max(of_layers, default=0)


def _stored_models(manifest: Manifest) -> int:
    """Return the number of compressed models in the run directory: with mixed inputs, drafts and trained layers."""
    refined = settings_of(manifest)
    return 2 if refined is not None and refined.inputs == "mixed" else 1


def _flops(job: PlannedJob, passes: PlannedPasses) -> tuple[float, float, float]:
    """Return the operations of forward passes, of moments and of solves."""
    tokens, groups = job.tokens, job.groups
    forwards = (2 if passes.compressed else 1) if any(task.moments or task.corrections for task in job.tasks) else 0
    layers = sum(forward_flops(layer, job.sequence) for layer in job.geometry.layers)
    return (
        tokens * (forwards + passes.importance / passes.shards) * layers,
        float(tokens * sum(_moment_flops(moment, layer) for layer, own in job.claimed for moment in own.moments)),
        sum(solve_flops(solve_work(task, groups[task.key], tokens)) for task in job.tasks if task.key in groups),
    )


def _with_samples_of(task: Task, tokens: int) -> Task:
    """Return a task whose samples have at most all calibration `tokens`."""
    most = [
        replace(moment, tokens=min(moment.tokens, tokens)) if moment.kind == "sample" else moment
        for moment in task.moments
    ]
    return replace(task, moments=tuple(most))


def expert_remarks(manifest: Manifest, geometry: Geometry) -> tuple[str, ...]:
    """Report the tokens of an expert with even routing, and how many samples would be enough."""
    experts = [block for layer in geometry.layers for block in layer.mlps if block.share < 1.0]
    calibration = manifest.calibration
    if not experts or calibration is None:
        return ()
    rarest = min(experts, key=lambda block: block.share / block.width)
    tokens = round(calibration.samples * calibration.sequence_length * rarest.share)
    needed = math.ceil(FEW_TOKENS * rarest.width / rarest.share / calibration.sequence_length)
    enough = needed <= calibration.samples
    return (
        f"calibration: an expert of {rarest.width} channels sees {tokens:,} tokens if routing is even, "
        f"{tokens / rarest.width:.1f} per channel"
        + (
            "" if enough else f"; {needed:,} samples of {calibration.sequence_length} would give {FEW_TOKENS} a channel"
        ),
    )


def source_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if experts are cut to a share below `ONE_TEXT_KEEP` with the statistics of a single file or dataset."""
    manifest = job.manifest
    cut = {task.method for layer, own in job.claimed for task in own.tasks if layer.routed_roles & {*task.roles}}
    own = [entry.keep for position, entry in enumerate(manifest.methods) if position in cut]
    common = manifest.budget.share if manifest.budget else 1.0
    keep = min((common if share is None else share for share in own), default=1.0)
    texts = manifest.calibration.texts if manifest.calibration else ()
    sources = {name for text, _ in texts for name in text.sources}
    if len(sources) != 1 or keep >= ONE_TEXT_KEEP:
        return ()
    return (
        f"calibration.text: a single source decides which experts are kept at a budget of {keep:g}: all tokens of "
        f"every expert are of {sources.pop()}; experts that other text needs may be removed (published: REAP "
        "calibrated only on C4 collapses on code): give more files, or a list of texts with shares",
    )


def stored_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if matrices stay in a storage format of the source beside rounded ones, which vLLM does not load."""
    claimed = {(task.layer, role) for task in job.tasks for role in task.roles}
    kept = {
        role
        for layer in job.geometry.layers
        for role in (key.rpartition(".")[0] for key, _, keeps in layer.own_bytes if keeps)
        if (layer.index, role) not in claimed
    }
    if job.manifest.quantize is None or not kept:
        return ()
    return (
        f"quantize: {', '.join(sorted(kept))} stay in the source's storage format beside rounded matrices; "
        "transformers loads that, vLLM does not: for vLLM leave out quantize.skip, so that all are rounded",
    )


def rank_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if a moment has more columns than the calibration text has tokens."""
    if job.manifest.calibration is None:
        return ()
    samples, length = job.manifest.calibration.samples, job.sequence
    widths = (
        (moment_width(moment, layer), moment.point)
        for layer, own in job.claimed
        for moment in own.moments
        if moment.kind in ("value", "pair") and not moment.diagonal
    )
    width, point = max(widths, default=(0, ""))
    if samples * length >= width:
        return ()
    return (
        f"calibration: {samples} samples of {length} are {samples * length} tokens, fewer than the {width} "
        f"columns of {point}: its statistics are rank-deficient, and directions outside of them are lost; raise "
        "calibration.samples or calibration.sequence_length",
    )


def _moment_flops(moment: Moment, geometry: LayerGeometry) -> float:
    width = moment_width(moment, geometry)
    return 0.0 if moment.kind == "sample" else 2.0 * geometry.share(moment.point) * moment.heads * width * width
