"""The bytes and operations of a job, from its manifest and geometry.

docs/architecture.md#the-way-of-a-layer.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, T calibration tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.cost_model.bounds import Size, bounded_by, size_bound
from pipeline.cost_model.memory import moment_bytes, worker_bytes
from pipeline.cost_model.passes import PlannedPasses, planned_passes
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.reads import read_phases
from pipeline.cost_model.refinement_work import settings_of
from pipeline.cost_model.solve_work import solve_flops, solve_work
from pipeline.cost_model.vocabulary import TOKENIZER_BYTES
from pipeline.cost_model.work import forward_flops
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment, Task
from pipeline.methods.work import moment_width

DRIVER_BYTES = 600 * 2**20  # the driver's process, with the buffers in which it checks files
TOKEN_BYTES = 4


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


def make_plan(job: PlannedJob, source_bytes: int, size: Size | None = None) -> Plan:
    """Plan a job. `size`: the checkpoint's exact size, if known."""
    manifest, geometry, calibration = job.manifest, job.geometry, job.manifest.calibration
    job = replace(job, tasks=[_with_samples_of(task, job.tokens) for task in job.tasks])
    passes = planned_passes(job)
    bound = "" if size else bounded_by(job)
    size = size or size_bound(job, source_bytes)
    host, device = worker_bytes(job, passes)
    reads = read_phases(job, size, source_bytes, passes)
    statistics = [sum(moment_bytes(moment, layer) for moment in own.moments) for layer, own in job.claimed]
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
        driver_peak_bytes=DRIVER_BYTES + (TOKENIZER_BYTES * geometry.vocab if calibration else 0) + job.tokens * 8,
        statistics_bytes_per_layer=max(statistics, default=0),
        activation_bytes=job.hidden_bytes,
        run_dir_bytes=_run_dir_bytes(job, passes, size, statistics),
        output_bytes=size.num_bytes,
        output_bound=bound,
        expected_numbers=size.numbers,
        dense_numbers=geometry.model_numbers(),
        forward_flops=forward,
        moment_flops=moments,
        solve_flops=solves,
        calibration_tokens=job.tokens,
        workers=min(manifest.workers.max, calibration.shards) if calibration else manifest.workers.max,
    )


def _run_dir_bytes(job: PlannedJob, passes: PlannedPasses, size: Size, statistics: Sequence[int]) -> int:
    """Return the bytes of the run directory: tokens, hidden states, moments, and compressed models or, before those,
    the inputs of the backward pass. `statistics`: bytes of each layer's moments.

    A refinement stores the hidden states of both models, and the targets of one layer, or of one layer per worker. With
    mixed inputs, solved layers are stored beside trained ones.
    """
    refined = settings_of(job.manifest)
    states = 2 if refined is None else 6 if refined.inputs == "compressed" else 2 + 2 * passes.workers
    models = (2 if refined is not None and refined.inputs == "mixed" else 1) * size.num_bytes
    if job.manifest.measures_unrounded:
        models += max(0, size.numbers * job.itemsize - size.num_bytes)
    inputs = job.gradient_tokens * job.geometry.hidden * job.itemsize * job.geometry.num_layers
    stored = sum(statistics) if passes.stores else max(statistics, default=0)
    return job.tokens * TOKEN_BYTES + states * job.hidden_bytes + stored + max(models, inputs)


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


def _moment_flops(moment: Moment, geometry: LayerGeometry) -> float:
    width = moment_width(moment, geometry)
    return 0.0 if moment.kind == "sample" else 2.0 * geometry.share(moment.point) * moment.heads * width * width
