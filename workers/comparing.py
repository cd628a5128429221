"""Compares a dense model with its compressed one on a few tokens in float32, with one layer in memory at a time.

Legend: B batch, S sequence, D hidden, V vocabulary, K directions of a sketch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manifests.records import StagedLayer
from pipeline.units.scores import Compare, CompareDone
from workers.config import WorkerConfig
from workers.embedding_and_head import embedding, head
from workers.layers import LayerReader
from workers.tensor_transfer import TensorTransfer

States = tuple[Tensor, Tensor]  # (B, S, D) of the dense model and of the compressed one
DIRECTIONS = 4
SEED = 0x5EED
_NOTHING = 1e-150


@dataclass(frozen=True)
class Comparison:
    """Errors and fingerprints of the compressed layers.

    Attributes:
        layer_errors: by layer, ‖compressed update − dense update‖ / ‖dense update‖, both on the dense model's hidden
            states.
        error: the error of the whole model's logits, relative to their deviation from the mean over tokens.
        sketch: by layer, projections of the compressed update on K random directions, divided by the norm of the dense
            update. They are about 1, and change if anything in the layer changes.
        logits_sketch: such projections of the compressed model's logits.
    """

    layer_errors: tuple[float, ...]
    error: float
    sketch: tuple[tuple[float, ...], ...]
    logits_sketch: tuple[float, ...]

    def report(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        report: dict[str, Any] = asdict(self)
        return report


@torch.inference_mode()
def compare_models(
    dense: LayerReader, packed: LayerReader, staged: Sequence[StagedLayer | None], ids_BS: Tensor
) -> Comparison:
    """Compare two models whose readers both return float32.

    `staged`: the records of the compressed layers, or None if `packed` reads them from its own checkpoint.
    """
    errors, sketches, states = compare_outputs(dense, packed, staged, embedded(dense, packed, staged[0], ids_BS))
    error, logits_sketch = compare_heads(dense, packed, staged[-1], states, len(staged))
    return Comparison(errors, error, sketches, logits_sketch)


def compare_some(unit: Compare, setup: WorkerConfig, device: torch.device, transfer: TensorTransfer) -> CompareDone:
    """Run a `Compare` unit: some layers of both models, and the heads if it includes them."""
    dense, packed = (LayerReader(replace(setup, dtype=torch.float32), device) for _ in range(2))
    if unit.before is None:
        ids_BS = torch.tensor(unit.tokens, dtype=torch.int64, device=device)
        states = embedded(dense, dense, unit.staged[0], ids_BS)
    else:
        before = transfer.get(unit.before)
        states = before["dense"].to(device), before["packed"].to(device)
    errors, sketches, states = compare_outputs(dense, packed, unit.staged, states, unit.first)
    figures = {"layer_errors": errors, "sketch": sketches}
    if not unit.head:
        return CompareDone(figures, transfer.put(dict(zip(("dense", "packed"), states, strict=True))))
    layers = unit.first + len(unit.staged)
    error, logits_sketch = compare_heads(dense, dense, unit.staged[-1], states, layers)
    return CompareDone({**figures, "error": error, "logits_sketch": logits_sketch})


def embedded(dense: LayerReader, packed: LayerReader, first: StagedLayer | None, ids_BS: Tensor) -> States:
    """Return the inputs of the first layer of both models.

    `packed` may be `dense`, if `first` has all that differs. In any case one table is held at a time.
    """
    dense_BSD = embedding(dense)(ids_BS)
    if packed is not dense:
        dense.release()
    return dense_BSD, embedding(packed, first)(ids_BS)


def compare_outputs(
    dense: LayerReader, packed: LayerReader, staged: Sequence[StagedLayer | None], states: States, first: int = 0
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...], States]:
    """Return errors and sketches of the layers from `first` on with inputs `states`, and the last layer's outputs."""
    (dense_BSD, packed_BSD), errors, sketches = states, [], []
    for layer, record in enumerate(staged, first):
        block = dense.block(layer, None)
        if layer + 1 < first + len(staged):
            dense.read_ahead(layer + 1)
        after_BSD = _run(block.run(dense_BSD))
        dense.current = None
        block = packed.block(layer, record)
        both_BSD = _run(block.run(torch.cat((dense_BSD, packed_BSD))))  # one batch reads slices of experts once
        alone_BSD, packed_BSD = both_BSD.chunk(2)
        packed.current = None
        update = norm_of(after_BSD - dense_BSD)
        errors.append(relative(alone_BSD - after_BSD, update))
        sketches.append(sketch(alone_BSD - dense_BSD, update, layer))
        dense_BSD = after_BSD
    dense.release_layer()
    return tuple(errors), tuple(sketches), (dense_BSD, packed_BSD)


def compare_heads(
    dense: LayerReader, packed: LayerReader, last: StagedLayer | None, states: States, layers: int
) -> tuple[float, tuple[float, ...]]:
    """Return error and sketch of the logits of models with `layers` layers. `packed`: as in `embedded`.

    With a large vocabulary, head and logits are the largest tensors of a job, so that each is freed after its last use.
    """
    dense_BSD, packed_BSD = states
    logits_TV = head(dense)(dense_BSD.flatten(0, 1))
    if packed is not dense:
        dense.release()
    packed_TV = head(packed, last)(packed_BSD.flatten(0, 1))
    packed.release()
    mean_V = logits_TV.mean(dim=0)
    spread = norm_of(logits_TV - mean_V)
    error = relative(packed_TV - logits_TV, spread)
    del logits_TV
    return error, sketch(packed_TV.sub_(mean_V), spread, layers)


def norm_of(tensor: Tensor) -> float:
    """Return ‖tensor‖, in float64."""
    norm: float = tensor.double().norm().item()
    return norm


def relative(error: Tensor, whole: float) -> float:
    """Return ‖error‖ / whole; 0 if the error is 0."""
    lost = norm_of(error)
    return lost / max(whole, _NOTHING) if lost != 0.0 else 0.0


def sketch(tensor: Tensor, unit: float, layer: int) -> tuple[float, ...]:
    """Return ⟨random signs, tensor⟩ / unit for K tensors of signs, seeded by the layer's number."""
    norm = max(unit, _NOTHING)
    generator = torch.Generator().manual_seed(SEED + layer)
    flat = tensor.double().flatten().cpu()
    projections = []
    for _ in range(DIRECTIONS):
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
        projections.append(float(signs.double() @ flat) / norm)
    return tuple(projections)


def deviation(report: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[float]:
    """Return the largest difference of two reports' sketches for each layer, and for the logits.

    Differences are relative if the recorded number is above 1.
    """
    pairs = [
        *zip(report["sketch"], recorded["sketch"], strict=True),
        (report["logits_sketch"], recorded["logits_sketch"]),
    ]
    return [
        max(abs(actual - known) / max(1.0, abs(known)) for actual, known in zip(ours, theirs, strict=True))
        for ours, theirs in pairs
    ]


def _run(result: Tensor | None) -> Tensor:
    assert result is not None
    return result
