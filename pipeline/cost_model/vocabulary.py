"""The memory of embedding, head and logits, which a large vocabulary makes the largest tensors of a job.

Legend: V vocabulary, D hidden, T tokens whose logits are computed together.
"""

from __future__ import annotations

import math

from manifests.schema import Manifest
from pipeline.cost_model.work import COMPARED_TOKENS
from pipeline.families.geometry import Geometry
from pipeline.kernels.gradients import NUMBERS_AT_ONCE
from pipeline.units.sharding import TEXT_TOKENS, held_out_windows

ROWS = 256  # as `ROWS_PER_LOGITS` and `ROWS_PER_HEAD` of workers
FLOAT = 4  # bytes of a number in float32, in which both models are scored and compared
COPIED_BYTES = 16  # per logit whose loss or divergence is computed: two in float32, one in float64
PULLED_BYTES = 10  # per logit in a backward pass: itself, and its gradient in half precision and again in float32
SKETCHED_BYTES = 22  # per logit that is compared: itself, random signs, both in float64, the signs in bytes
TOKENIZER_BYTES = 1900  # per word, while a tokenizer of a hub is parsed, with its merges


def pulled_logits_bytes(manifest: Manifest, geometry: Geometry, itemsize: int) -> int:
    """Return the memory of the head and its logits where the gradient of the model's loss is computed."""
    if manifest.calibration is None or manifest.calibration.gradient.kind == "local":
        return 0
    logits = min(ROWS, manifest.calibration.sequence_length) * geometry.vocab
    pulling = (
        FLOAT * geometry.hidden * geometry.vocab + PULLED_BYTES * logits + COPIED_BYTES * _copied(manifest, logits)
    )
    return max(_loading(geometry, itemsize), pulling)


def _loading(geometry: Geometry, itemsize: int) -> int:
    """Return the memory to read an embedding or a head in the source's dtype, and to convert it to float32."""
    return (FLOAT + (itemsize if itemsize < FLOAT else 0)) * geometry.hidden * geometry.vocab


def _copied(manifest: Manifest, logits: int) -> int:
    """Return how many of the logits are copied at a time."""
    return min(logits, NUMBERS_AT_ONCE) if manifest.workers.gpus == 0 else logits


def outer_bytes(manifest: Manifest, geometry: Geometry, itemsize: int, window: int) -> int:
    """Return the most memory of embedding or head, and of logits, where models are scored and compared.

    `window`: tokens of a micro-batch. The embedding is held beside the first layer and the head beside the last.
    """
    numbers, vocab, loading = geometry.hidden * geometry.vocab, geometry.vocab, _loading(geometry, itemsize)
    wide, logits = FLOAT * numbers, min(ROWS, window) * vocab
    heads = 2 if manifest.quantize is not None and "head" in manifest.quantize.outer_roles and not geometry.tied else 1
    compared = COMPARED_TOKENS * vocab
    comparing = max(loading, wide + 2 * FLOAT * compared, SKETCHED_BYTES * compared)
    if manifest.calibration is None:
        return comparing
    scored = wide + 2 * FLOAT * logits + COPIED_BYTES * _copied(manifest, logits)
    return max(comparing, (heads - 1) * wide + max(loading, scored))


def window_bytes(manifest: Manifest, geometry: Geometry, workers: int) -> tuple[int, int]:
    """Return the bytes of a worker's hidden states in float32: of held-out windows, and of both texts.

    Held-out windows are held beside calibration samples; both texts pass before these.

    A worker takes windows through one model at a time; with several workers, half of them take each text.
    """
    if (calibration := manifest.calibration) is None:
        return 0, 0
    samples, length = calibration.samples, calibration.sequence_length
    texts = min(samples * length, TEXT_TOKENS) + (TEXT_TOKENS if manifest.evaluation.perplexity else 0)
    token = FLOAT * geometry.hidden
    return token * length * held_out_windows(samples, samples, length), token * texts // math.ceil(workers / 2)
