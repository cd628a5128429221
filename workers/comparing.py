"""A dense model and what was made of it, side by side on a few tokens in float32, a layer in memory at a time.

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
    """What the compressed layers do, and how far from the dense ones.

    Attributes:
        layer_errors: ‖update of the compressed layer − of the dense one‖ / ‖of the dense one‖, both on the dense
            model's hidden states.
        error: the same of the logits, beside their mean over tokens; of the whole compressed model.
        sketch: by layer, the compressed layer's update on K random directions, by the norm of the dense one: numbers
            of size one that differ when anything in the layer does.
        logits_sketch: the same of the compressed model's logits.
    """

    layer_errors: tuple[float, ...]
    error: float
    sketch: tuple[tuple[float, ...], ...]
    logits_sketch: tuple[float, ...]

    def report(self) -> dict[str, Any]:
        """As JSON."""
        report: dict[str, Any] = asdict(self)
        return report


@torch.inference_mode()
def compare_models(
    dense: LayerReader, packed: LayerReader, staged: Sequence[StagedLayer | None], ids_BS: Tensor
) -> Comparison:
    """`staged`: by layer, the record of the compressed one; None: as `packed` reads it from its own checkpoint.

    Both readers give float32. Raises as reading does.
    """
    errors, sketches, states = compare_layers(dense, packed, staged, embedded(dense, packed, staged[0], ids_BS))
    error, logits_sketch = compare_heads(dense, packed, staged[-1], states, len(staged))
    return Comparison(errors, error, sketches, logits_sketch)


def compare_some(unit: Compare, setup: WorkerConfig, device: torch.device, transfer: TensorTransfer) -> CompareDone:
    """Both models in float32; of each no more than a layer at a time. Raises as reading and `transfer` do."""
    dense, packed = (LayerReader(replace(setup, dtype=torch.float32), device) for _ in range(2))
    if unit.before is None:
        ids_BS = torch.tensor(unit.tokens, dtype=torch.int64, device=device)
        states = embedded(dense, packed, unit.staged[0], ids_BS)
    else:
        found = transfer.get(unit.before)
        states = found["dense"].to(device), found["packed"].to(device)
    errors, sketches, states = compare_layers(dense, packed, unit.staged, states, unit.first)
    figures = {"layer_errors": errors, "sketch": sketches}
    if not unit.head:
        return CompareDone(figures, transfer.put(dict(zip(("dense", "packed"), states, strict=True))))
    layers = unit.first + len(unit.staged)
    error, logits_sketch = compare_heads(dense, packed, unit.staged[-1], states, layers)
    return CompareDone({**figures, "error": error, "logits_sketch": logits_sketch})


def embedded(dense: LayerReader, packed: LayerReader, first: StagedLayer | None, ids_BS: Tensor) -> States:
    """What enters the first layer of both models."""
    return embedding(dense)(ids_BS), embedding(packed, first)(ids_BS)


def compare_layers(
    dense: LayerReader, packed: LayerReader, staged: Sequence[StagedLayer | None], states: States, first: int = 0
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...], States]:
    """Errors and sketches of layers from `first` on, of which `states` enter that, and what leaves the last of them."""
    (dense_BSD, packed_BSD), errors, sketches = states, [], []
    for layer, record in enumerate(staged, first):
        block = dense.block(layer, None)
        if layer + 1 < first + len(staged):
            dense.read_ahead(layer + 1)
        after_BSD = _run(block.run(dense_BSD))
        dense.current = None
        block = packed.block(layer, record)
        alone_BSD, packed_BSD = _run(block.run(dense_BSD)), _run(block.run(packed_BSD))
        packed.current = None
        update_BSD = after_BSD - dense_BSD
        errors.append(relative(alone_BSD - after_BSD, update_BSD))
        sketches.append(sketch(alone_BSD - dense_BSD, update_BSD, layer))
        dense_BSD = after_BSD
    dense.release_layer()
    return tuple(errors), tuple(sketches), (dense_BSD, packed_BSD)


def compare_heads(
    dense: LayerReader, packed: LayerReader, last: StagedLayer | None, states: States, layers: int
) -> tuple[float, tuple[float, ...]]:
    """Error and sketch of the logits behind so many layers."""
    dense_BSD, packed_BSD = states
    logits_TV = head(dense)(dense_BSD.flatten(0, 1))
    found_TV = head(packed, last)(packed_BSD.flatten(0, 1))
    spread_TV = logits_TV - logits_TV.mean(dim=0)
    return relative(found_TV - logits_TV, spread_TV), sketch(found_TV - logits_TV.mean(dim=0), spread_TV, layers)


def relative(error: Tensor, whole: Tensor) -> float:
    """Ratio of two norms; 0 for no error, also of nothing."""
    lost = error.double().norm().item()
    return lost / max(whole.double().norm().item(), _NOTHING) if lost != 0.0 else 0.0


def sketch(tensor: Tensor, unit: Tensor, layer: int) -> tuple[float, ...]:
    """⟨random signs, tensor⟩ / ‖unit‖ for K tensors of signs, which the layer's number seeds."""
    norm = max(unit.double().norm().item(), _NOTHING)
    generator = torch.Generator().manual_seed(SEED + layer)
    flat = tensor.double().flatten().cpu()
    found = []
    for _ in range(DIRECTIONS):
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
        found.append(float(signs.double() @ flat) / norm)
    return tuple(found)


def deviation(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[float]:
    """How far two reports' sketches are apart, by layer and of the logits last; as shares where they are above one."""
    pairs = [
        *zip(found["sketch"], recorded["sketch"], strict=True),
        (found["logits_sketch"], recorded["logits_sketch"]),
    ]
    return [
        max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(ours, theirs, strict=True))
        for ours, theirs in pairs
    ]


def _run(result: Tensor | None) -> Tensor:
    assert result is not None
    return result
