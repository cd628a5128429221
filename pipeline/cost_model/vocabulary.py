"""The memory of embedding, head and logits, which a large vocabulary makes the largest tensors of a job.

Legend: V vocabulary, D hidden, T tokens whose logits are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from manifests.schema import Manifest
from pipeline.cost_model.work import COMPARED_TOKENS
from pipeline.families.geometry import Geometry
from pipeline.kernels.gradients import NUMBERS_AT_ONCE
from pipeline.methods.method import Task
from pipeline.methods.registry import layer_gradients, layers_of
from pipeline.units.sharding import TEXT_TOKENS, held_out_windows

ROWS = 256  # as `ROWS_PER_LOGITS` and `ROWS_PER_HEAD` of workers
FLOAT = 4  # bytes of a number in float32, in which both models are scored and compared
COPIED_BYTES = 16  # per logit whose loss or divergence is computed: two in float32, one in float64
PULLED_BYTES = 10  # per logit in a backward pass: itself, and its gradient in half precision and again in float32
SKETCHED_BYTES = 22  # per logit that is compared: itself, random signs, both in float64, the signs in bytes
TOKENIZER_BYTES = 1900  # per word, while a tokenizer of a hub is parsed, with its merges


def outer_bytes(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], itemsize: int, window: int) -> int:
    """Return the most memory that embedding or head take with the logits of a step. `window`: tokens of a micro-batch.

    The embedding is held beside the first layer and the head beside the last, each in the dtype of its pass. Both are
    read in the source's dtype, and converted.
    """
    numbers, vocab, tokens = geometry.hidden * geometry.vocab, geometry.vocab, min(ROWS, window)
    wide = FLOAT * numbers
    loading = wide + (itemsize * numbers if itemsize < FLOAT else 0)
    heads = 2 if manifest.quantize is not None and "head" in manifest.quantize.outer_roles and not geometry.tied else 1
    copied = min(tokens * vocab, max(vocab, NUMBERS_AT_ONCE)) if manifest.workers.gpus == 0 else tokens * vocab
    compared = COMPARED_TOKENS * vocab
    comparing = max(loading, wide + 2 * FLOAT * compared, SKETCHED_BYTES * compared)
    if manifest.calibration is None:
        return comparing
    scoring = (heads - 1) * wide + max(loading, wide + 2 * FLOAT * tokens * vocab + COPIED_BYTES * copied)
    pulling = 0
    if manifest.calibration.gradient.kind == "model" and any(layer_gradients(tasks, at) for at in layers_of(tasks)):
        pulling = max(loading, wide + PULLED_BYTES * tokens * vocab + COPIED_BYTES * copied)
    return max(comparing, scoring, pulling)


def window_bytes(manifest: Manifest, geometry: Geometry, workers: int) -> tuple[int, int]:
    """Return a worker's hidden states, in float32, of held-out windows, beside samples, and of both texts before these.

    A worker takes windows through one model at a time; with several workers, half of them take each text.
    """
    if (calibration := manifest.calibration) is None:
        return 0, 0
    samples, length = calibration.samples, calibration.sequence_length
    texts = min(samples * length, TEXT_TOKENS) + (TEXT_TOKENS if manifest.evaluation.perplexity else 0)
    token = FLOAT * geometry.hidden
    return token * length * held_out_windows(samples, samples, length), token * texts // math.ceil(workers / 2)


def rounded_outer_bytes(manifest: Manifest, geometry: Geometry, copies: int) -> int:
    """Return the memory to round an embedding or a head, with as many bytes for each of its numbers."""
    if manifest.quantize is None or geometry.tied or not manifest.quantize.outer_roles:
        return 0
    return copies * math.prod((geometry.hidden, geometry.vocab))
