"""The memory of a worker: that of its process, and the most that a step of the job holds.

Legend: D hidden, V vocabulary.
"""

from __future__ import annotations

import math

from manifests.schema import Manifest
from pipeline.cost_model.completion_work import completion_bytes, moments_without_others
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.refinement_work import SCORES, VALUE_BYTES, backward_numbers, refine_bytes, settings_of
from pipeline.cost_model.vocabulary import FLOAT, outer_bytes, pulled_logits_bytes
from pipeline.cost_model.work import pair_bytes
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.gptq import FED_NUMBERS
from pipeline.kernels.moments import ROWS_PER_PRODUCT
from pipeline.methods.experts.removal import REFITTED
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import LayerTasks
from pipeline.methods.work import moment_width
from pipeline.units.sharding import TEXT_TOKENS

DEVICE_PROCESS_BYTES = 2 * 2**30  # additional host memory for CUDA's libraries and context
PROCESS_BYTES = 440 * 2**20  # a worker's Python with torch, transformers and ray, and what its libraries set up
KEPT_BYTES = 96 * 2**20  # freed memory that its heap keeps (`workers.memory`: TRIMMED_BYTES), and compiled kernels
MOMENT_BYTES = 8  # float64
SOLVE_COPIES = 3  # copies of a moment: C, its inverse and W_down's gram, the panels (tests/kernels/test_elimination.py)
CURVE_COPIES = 4  # one more for the kept channels, with its factor
FED_BYTES = 30  # per number that is rounded with error feedback at a time: in float32 and float64, errors, codes
SAMPLE_BYTES = 8  # per number of a sample, in addition to the sample, if experts are solved together
CURVE_SAMPLE_BYTES = 4 * (1 + REFITTED)  # the same, if a curve measures refits


def worker_bytes(job: PlannedJob, passes: PlannedPasses) -> tuple[int, int]:
    """Return a worker's peak of host and of device memory, at the largest layer. Without a GPU, the latter is 0.

    With a GPU, host memory holds the process, a layer that is read ahead, hidden states, and a layer's reduced
    moments.
    """
    workers, (layer, placed) = job.manifest.workers, layer_bytes(job)
    summed = max((part_bytes(geometry, own, workers.experts) for geometry, own in job.claimed), default=0)
    solving = solving_bytes(job)
    if passes.in_pass:  # in memory at the same time: two layers of the pass, and the sums (triangles) of two layers
        solving += layer + placed + summed
    computing = max(solving, layer + placed + _passing_bytes(job, summed))
    host, limit = PROCESS_BYTES + KEPT_BYTES, int(workers.activation_memory_gb * 2**30)
    host += min(_held_states(job, passes.workers), limit)
    if settings_of(job.manifest):
        host += min(2 * job.hidden_bytes, limit)  # the targets
    if workers.gpus:
        return host + DEVICE_PROCESS_BYTES + layer + summed, computing
    return host + computing + shared_bytes(passes, summed, layer), 0


def _held_states(job: PlannedJob, workers: int) -> int:
    """Return the bytes of a worker's hidden states: of calibration samples beside held-out windows, or of both texts,
    which pass before these.

    A worker takes windows through one model at a time. Texts are counted as if in float32, on half of the workers.
    """
    if not job.tokens:
        return 0
    token, itemsize, states = FLOAT * job.geometry.hidden, job.itemsize, job.hidden_bytes
    if job.geometry.streams(job.manifest.workers.experts):  # between the slices of a layer
        states = states * (2 * itemsize + max(FLOAT, itemsize)) // itemsize
    texts = min(job.tokens, TEXT_TOKENS) + (TEXT_TOKENS if job.manifest.evaluation.perplexity else 0)
    windows = job.held_out_windows * job.sequence
    return max(states // workers + token * windows, token * texts // math.ceil(workers / 2))


def _passing_bytes(job: PlannedJob, summed: int) -> int:
    """Return the most memory that a pass takes beside its layer. `summed`: bytes of the moments summed at a time."""
    calibration, geometry = job.manifest.calibration, job.geometry
    widest = max(block.width for each in geometry.layers for block in each.mlps)
    features = 6 * geometry.hidden + max(
        3 * round(sum(block.share * block.width for block in each.mlps)) + 4 * each.query_features
        for each in geometry.layers
    )
    batch = calibration.micro_batch * job.sequence if calibration else 0
    # Values of several micro-batches are joined for one product.
    shard = -(-calibration.samples // calibration.shards) * job.sequence if calibration else 0
    rows = max(batch, min(ROWS_PER_PRODUCT, shard))
    waiting = (rows - batch) * _summed_features(job) * job.itemsize
    product = rows * widest * FLOAT if summed else 0  # its rows are scaled first
    embedding = geometry.hidden * geometry.vocab * job.itemsize if calibration else 0  # beside the first layer
    values = batch * features * FLOAT
    return max(embedding + summed + values + waiting + product, values + outer_bytes(job, batch), gradient_bytes(job))


def _summed_features(job: PlannedJob) -> int:
    """Count the numbers of a token, with even routing, at the points whose values are summed, in the widest layer."""
    each = (
        sum(layer.share(moment.point) * moment.heads * moment_width(moment, layer) for moment in moments)
        for layer, own in job.claimed
        if (moments := [moment for moment in own.moments if moment.kind == "value"])
    )
    return round(max(each, default=0))


def gradient_bytes(job: PlannedJob) -> int:
    """Return the memory of the backward pass of a sample beside its layer; 0 without gradients.

    It holds the values that a layer's backward pass needs, with the scores of attention, and the tensors to be summed:
    gradients of several samples that wait for one product, and triangles. After the last layer, the head is
    differentiated while these values wait; then two more copies of the scores are needed.
    """
    asking = [(layer, own.gradients) for layer, own in job.claimed if own.gradients]
    if job.manifest.calibration is None or not asking:
        return 0
    sequence = job.sequence
    tokens = -(-job.gradient_tokens // job.manifest.calibration.shards)
    rows, most = max(sequence, min(ROWS_PER_PRODUCT, tokens)), 0
    for layer, moments in asking:
        waiting = rows * sum(layer.share(each.point) * each.heads * moment_width(each, layer) for each in moments)
        sums = sum(moment_bytes(each, layer) for each in moments) // 2
        values = sequence * backward_numbers(layer, sum(block.share * block.width for block in layer.mlps))
        scores = VALUE_BYTES * layer.query_heads * sequence**2
        pulled = max((SCORES - 1) * scores, pulled_logits_bytes(job))
        most = max(most, round(VALUE_BYTES * (waiting + values)) + sums + scores + pulled)
    return most


def layer_bytes(job: PlannedJob) -> tuple[int, int]:
    """Return the bytes of the largest layer as it is read ahead (onto the GPU, if there is one) and as it is computed.

    If a layer has more experts than a worker holds, only one slice of them counts.
    """
    workers = job.manifest.workers
    held = [(each, each.held_roles(workers.experts)) for each in job.geometry.layers]
    largest = max(each.numbers(roles) for each, roles in held)
    stored = max(each.num_bytes(roles) for each, roles in held)
    if workers.gpus:
        return stored, max(stored, largest * job.itemsize)
    return stored, largest * max(FLOAT, job.itemsize)  # a CPU may use float32


def shared_bytes(passes: PlannedPasses, summed: int, stored: int) -> int:
    """Return the pages of Ray's object store that a worker's process touches, which count as its memory, too.

    They hold its own sums (triangles), those that it adds, and their total, for the layers whose sums are in flight,
    the sums of layers that wait to be solved, and factors. `summed`: bytes of a layer's whole moments.
    """
    sums = 3 if passes.workers > 1 else 1
    return (passes.in_flight * sums + passes.waiting) * summed // 2 + (1 if passes.compressed else 2) * stored


def part_bytes(layer: LayerGeometry, own: LayerTasks, experts: int) -> int:
    """Return the bytes of the sums that a worker holds at a time: moments of a slice of experts and of points outside
    of experts, or the pairs of one step of a correction."""
    roles = frozenset(layer.held_roles(experts))
    inside = [(block, (block.writer.reads, block.input if block.weighed else "")) for block in layer.mlps]
    held = {point for block, points in inside if roles.issuperset(block.roles) for point in points}
    passing = {point for _, points in inside for point in points} - held
    moments = (moment for moment in own.moments if moment.point not in passing)
    pairs = {moment for task in own.tasks for moment in task.corrections}
    return max(sum(moment_bytes(moment, layer) for moment in moments), *pair_bytes(sorted(pairs), layer), 0)


def solving_bytes(job: PlannedJob) -> int:
    """Return the memory of the largest solve or training of a layer."""
    manifest, held = job.manifest, job.manifest.workers.experts
    solves = (
        _streamed_bytes(task, layer)
        if layer.num_experts > held and _experts_of(task, layer) > held
        else max(solve_bytes(task, layer), rounding_bytes(manifest, task, layer), correction_bytes(task, layer))
        for layer, own in job.claimed
        for task in own.tasks
    )
    trainings = (refine_bytes(manifest, layer) for layer, _ in job.claimed)
    return max((*solves, *trainings), default=0)


def solve_bytes(task: Task, geometry: LayerGeometry) -> int:
    """Return the memory of a task on a worker: moments and their copies, samples, and weights, also in float64.

    Moments are completed before they are copied.
    """
    samples = sum(moment_bytes(moment, geometry) for moment in task.moments if moment.kind == "sample")
    moments = sum(moment_bytes(moment, geometry) for moment in task.moments if moment.kind != "sample")
    fits = any(moment.kind == "sample" for moment in moments_without_others(task, geometry))
    copies = (CURVE_COPIES if fits else SOLVE_COPIES) * moments
    solving = max(copies, 2 * moments + completion_bytes(task, geometry))
    return solving + samples + geometry.numbers(task.roles) * 8 + geometry.num_bytes(task.roles)


def correction_bytes(task: Task, geometry: LayerGeometry) -> int:
    """Return the memory to correct and round a task without moments of its own; others hold more while they are solved.

    It has the pair E[x xᵀ], E[e xᵀ] of a point, the damped moment and its factor, and the weights, also in float64.
    """
    if task.moments or not task.corrections:
        return 0
    width, numbers = max(geometry.features(pair.point) for pair in task.corrections), geometry.numbers(task.roles)
    sums = MOMENT_BYTES * width * (3 * width + geometry.hidden)
    return sums + 8 * numbers + geometry.num_bytes(task.roles) + FED_BYTES * min(FED_NUMBERS, numbers)


def rounding_bytes(manifest: Manifest, task: Task, geometry: LayerGeometry) -> int:
    """Return the memory to round a task's matrices with error feedback: moments, a factor, and the matrices that are
    rounded together because they read the same input; 0 without feedback."""
    if manifest.quantize is None or not manifest.rounds_by_feedback:
        return 0
    moments = [moment_bytes(moment, geometry) for moment in task.moments if moment.kind != "sample"]
    together: dict[str, int] = {}
    for role in task.roles:
        if role in geometry.reads and not manifest.quantize.skips(role):
            point = geometry.reads[role]
            together[point] = together.get(point, 0) + math.prod(geometry.weight_shape(role))
    fed = min(FED_NUMBERS, max(together.values(), default=0))
    return sum(moments) + 2 * max(moments, default=0) + geometry.num_bytes(task.roles) + FED_BYTES * fed


def _experts_of(task: Task, layer: LayerGeometry) -> int:
    """Count the experts that a task compresses together."""
    return len({block.name for block in layer.mlps if block.routing and block.roles[0] in task.roles})


def _streamed_bytes(task: Task, geometry: LayerGeometry) -> int:
    """Return the memory of a task whose experts are read one at a time.

    Memory holds two experts and the one that is being read, one expert in float64 with its moment, the sampled inputs,
    and more vectors per token in float32: the output to fit and its residual, or as many bytes of changes. A curve,
    which needs the gradient's moment, holds a residual for each refit that it measures.
    """
    expert = next(block for block in geometry.mlps if block.routing and block.roles[0] in task.roles)
    routed = {role for block in geometry.mlps if block.routing for role in block.roles}
    outside = [role for role in task.roles if role not in routed]
    extra = SAMPLE_BYTES if all(moment.kind == "sample" for moment in task.moments) else CURVE_SAMPLE_BYTES
    samples = sum(
        moment_bytes(moment, geometry) + moment.tokens * extra * moment_width(moment, geometry)
        for moment in task.moments
        if moment.kind == "sample"
    )
    moments = sum(moment_bytes(moment, geometry) for moment in task.moments if moment.kind != "sample")
    moments += MOMENT_BYTES * expert.width**2
    weights = 3 * geometry.num_bytes(expert.roles) + 8 * geometry.numbers(expert.roles) + geometry.num_bytes(outside)
    return SOLVE_COPIES * moments + samples + weights


def moment_bytes(moment: Moment, geometry: LayerGeometry) -> int:
    """Return the size of a moment in memory."""
    width = moment_width(moment, geometry)
    if moment.kind == "sample":
        return moment.tokens * width * geometry.bits // 8
    return moment.groups * width * (1 if moment.diagonal else width) * MOMENT_BYTES
