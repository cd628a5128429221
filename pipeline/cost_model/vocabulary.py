"""The memory of embedding, head and logits, which a large vocabulary makes the largest tensors of a job.

Legend: V vocabulary, D hidden, T tokens whose logits are computed together.
"""

from __future__ import annotations

from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.work import COMPARED_TOKENS
from pipeline.kernels.gradients import NUMBERS_AT_ONCE

ROWS = 256  # as `ROWS_PER_LOGITS` and `ROWS_PER_HEAD` of workers
FLOAT = 4  # bytes of a number in float32, in which both models are scored and compared
COPIED_BYTES = 16  # per logit whose loss or divergence is computed: two in float32, one in float64
PULLED_BYTES = 10  # per logit in a backward pass: itself, and its gradient in half precision and again in float32
SKETCHED_BYTES = 22  # per logit that is compared: itself, random signs, both in float64, the signs in bytes
TOKENIZER_BYTES = 1900  # per word, while a tokenizer of a hub is parsed, with its merges


def pulled_logits_bytes(job: PlannedJob) -> int:
    """Return the memory of the head and its logits where the gradient of the model's loss is computed."""
    calibration, geometry = job.manifest.calibration, job.geometry
    if calibration is None or calibration.gradient.kind == "local":
        return 0
    logits = min(ROWS, job.sequence) * geometry.vocab
    head = FLOAT * geometry.hidden * geometry.vocab
    return max(_loading(job), head + PULLED_BYTES * logits + COPIED_BYTES * _copied(job.manifest, logits))


def outer_bytes(job: PlannedJob, window: int) -> int:
    """Return the most memory of embedding or head, and of logits, where models are scored and compared.

    `window`: tokens of a micro-batch. The embedding is held beside the first layer and the head beside the last.
    """
    quantize, geometry, loading = job.manifest.quantize, job.geometry, _loading(job)
    wide, logits = FLOAT * geometry.hidden * geometry.vocab, min(ROWS, window) * geometry.vocab
    compared = COMPARED_TOKENS * geometry.vocab
    comparing = max(loading, wide + 2 * FLOAT * compared, SKETCHED_BYTES * compared)
    if job.manifest.calibration is None:
        return comparing
    second_head = wide if quantize is not None and "head" in quantize.outer_roles and not geometry.tied else 0
    scored = wide + 2 * FLOAT * logits + COPIED_BYTES * _copied(job.manifest, logits)
    return max(comparing, second_head + max(loading, scored))


def _loading(job: PlannedJob) -> int:
    """Return the memory to read an embedding or a head in the source's dtype, and to convert it to float32."""
    itemsize = job.itemsize if job.itemsize < FLOAT else 0
    return (FLOAT + itemsize) * job.geometry.hidden * job.geometry.vocab


def _copied(manifest: Manifest, logits: int) -> int:
    """Return how many of the logits are copied at a time."""
    return min(logits, NUMBERS_AT_ONCE) if manifest.workers.gpus == 0 else logits
