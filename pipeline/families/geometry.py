"""The geometry of one model: its layers and the tensors outside of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from pipeline.families.layer_geometry import LayerGeometry


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model and of its layers.

    Attributes:
        layers: the layers in order; sizes may differ from layer to layer.
        outer: (name, shape) of every tensor outside of the layers.
        outer_bits: name -> bits of a number, for outer tensors in another dtype than the layers.
        outer_bytes: for outer weights in a storage format: name, bytes in the source, and whether OUTPUT may keep the
            format.
        latent_faults: the properties that DeepSeek's class with latent attention and dense MLPs cannot express.
    """

    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers_path: str
    layers: tuple[LayerGeometry, ...]
    outer: tuple[tuple[str, tuple[int, ...]], ...]
    outer_bits: tuple[tuple[str, int], ...] = ()
    outer_bytes: tuple[tuple[str, int, bool], ...] = ()
    latent_faults: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Return the bits of most stored numbers, the unit in which indices are counted; the same in all layers."""
        return self.layers[0].bits

    @property
    def num_layers(self) -> int:
        """Count the layers."""
        return len(self.layers)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Map every tensor that the checkpoint must hold to its shape."""
        expected = dict(self.outer)
        for layer in self.layers:
            expected.update(layer.tensors().values())
        return expected

    def decoder_numbers(self) -> int:
        """Count the numbers of the dense layers."""
        return sum(layer.numbers() for layer in self.layers)

    def scope_numbers(self, scope: str) -> int:
        """Count the dense numbers in a budget's scope: `model`, `decoder` or `experts`."""
        if scope == "experts":
            return sum(layer.numbers(layer.routed_roles) for layer in self.layers)
        return self.model_numbers() if scope == "model" else self.decoder_numbers()

    def scope_bytes(self, scope: str) -> int:
        """Count the dense bytes in a budget's scope, as the source stores them."""
        if scope == "experts":
            return sum(layer.stored_bytes(layer.routed_roles) for layer in self.layers)
        return self.model_bytes() if scope == "model" else self.decoder_bytes()

    def model_numbers(self) -> int:
        """Count the numbers of the whole dense model, tied embeddings once."""
        return self.decoder_numbers() + sum(math.prod(shape) for _, shape in self.outer)

    def saved_bytes(self, scope: str) -> int:
        """Count the bytes that the source's storage formats save in a budget's scope."""
        if scope == "experts":
            return sum(layer.saved_bytes(layer.routed_roles) for layer in self.layers)
        saved = sum(layer.saved_bytes() for layer in self.layers)
        return saved + sum(self._outer_saved.values()) if scope == "model" else saved

    def grown_outer_bytes(self, claimed: Collection[str]) -> int:
        """Count the bytes by which outer weights grow if the claimed ones, given by name, and those in formats that
        OUTPUT cannot keep, are decoded."""
        kept = {name for name, _, keeps in self.outer_bytes if keeps} - {*claimed}
        return sum(saved for name, saved in self._outer_saved.items() if name not in kept)

    @cached_property
    def _outer_saved(self) -> dict[str, int]:
        """Map each outer weight in a storage format to the saved bytes."""
        bits, shapes = dict(self.outer_bits), dict(self.outer)
        return {
            name: math.prod(shapes[name]) * bits.get(name, self.bits) // 8 - own for name, own, _ in self.outer_bytes
        }

    def streams(self, held: int) -> bool:
        """Return True if a layer has more experts than the `held` ones that a worker holds at a time."""
        return any(layer.num_experts > held for layer in self.layers)

    def decoder_bytes(self) -> int:
        """Count the bytes of the dense layers in the source."""
        return sum(layer.stored_bytes() for layer in self.layers)

    def model_bytes(self) -> int:
        """Count the bytes of the whole dense model in the source, tied embeddings once."""
        bits, stored = dict(self.outer_bits), {name: own for name, own, _ in self.outer_bytes}
        sizes = {name: math.prod(shape) * bits.get(name, self.bits) // 8 for name, shape in self.outer}
        return self.decoder_bytes() + sum((sizes | stored).values())
