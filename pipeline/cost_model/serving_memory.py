"""The memory of an engine that serves a checkpoint: cache, activations and what the engine itself takes.

docs/plan.md#fit has the rule and the sources of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.engines import Engine
from manifests.fit import Device, Fit
from manifests.quantize import Quantize
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Method

SLIDING = "sliding_attention"
MIB = 2**20


@dataclass(frozen=True)
class EngineMemory:
    """The rule of an engine on a device.

    Attributes:
        share: the share of the memory that the engine takes by default.
        process_bytes: the memory of its process without a model.
        tokens: the most tokens of a forward pass; None: all prompts at once.
        cache_bits: bits of a cached number; None: as many as a weight has.
        logit_rows: rows of the vocabulary in a forward pass; None: one for each sequence.
        logit_bytes: bytes of each number of these rows.
        source: the origin of these figures.
        token_bytes: bytes of each token of the vocabulary, whose text its processes hold.
        copied_bits: bits of the codes that it holds a second time, rearranged for its kernels.
        copies_head: it holds the output embedding a second time, likewise.
    """

    share: float
    process_bytes: int
    tokens: int | None
    cache_bits: int | None
    logit_rows: int | None
    logit_bytes: int
    source: str
    token_bytes: int = 0
    copied_bits: frozenset[int] = frozenset()
    copies_head: bool = False


# One row for each engine and device; docs/plan.md#fit says where each figure is from.
ENGINES: Mapping[tuple[Engine, Device], EngineMemory] = {
    ("transformers", "cpu"): EngineMemory(1.0, 440 * MIB, None, None, None, 8, "measured"),
    ("transformers", "gpu"): EngineMemory(0.95, 600 * MIB, None, None, None, 8, "assumed"),
    ("vllm", "cpu"): EngineMemory(1.0, 1790 * MIB, 2048, None, None, 8, "measured", 2450, copies_head=True),
    ("vllm", "gpu"): EngineMemory(0.92, 800 * MIB, 8192, None, 256, 8, "from its documents"),
    ("llama.cpp", "cpu"): EngineMemory(1.0, 38 * MIB, 512, 16, None, 20, "measured", 300, frozenset({4})),
    ("llama.cpp", "gpu"): EngineMemory(0.97, 500 * MIB, 512, 16, 512, 4, "from its documents"),
}


@dataclass(frozen=True)
class ServingMemory:
    """The memory that serving takes beside the weights, and the limit of all together.

    Attributes:
        single_bytes: bytes of the weights that the engine holds once, where it holds others twice; None: all are held
            once.
    """

    fit: Fit
    cache_bytes: int
    activation_bytes: int
    engine_bytes: int
    single_bytes: int | None = None

    @property
    def engine(self) -> EngineMemory:
        """The rule of the engine."""
        return ENGINES[self.fit.engine, self.fit.device]

    @property
    def beside_weights(self) -> int:
        """The bytes of cache, activations and the engine, within its share of the memory."""
        return self.cache_bytes + self.activation_bytes + self.engine_bytes

    @property
    def weight_bytes(self) -> int:
        """The bytes that weights may take; negative if the rest does not fit."""
        held = math.floor(self.fit.memory * self.engine.share) - self.beside_weights
        return held if self.single_bytes is None or held < self.single_bytes else (held + self.single_bytes) // 2

    def copied_bytes(self, weight_bytes: float) -> int:
        """Return the bytes of second copies, with weights of this size."""
        return 0 if self.single_bytes is None else max(0, math.ceil(weight_bytes) - self.single_bytes)

    def needed(self, weight_bytes: float) -> int:
        """Return the smallest memory in which weights of this size can be served."""
        return math.ceil((weight_bytes + self.copied_bytes(weight_bytes) + self.beside_weights) / self.engine.share)

    def report(self, weight_bytes: int) -> dict[str, Any]:
        """Return the sum with weights of this size, as JSON. The overhead includes what the engine leaves unused."""
        unused = self.fit.memory - math.floor(self.fit.memory * self.engine.share)
        parts = {
            "weights": weight_bytes,
            "copies": self.copied_bytes(weight_bytes),
            "cache": self.cache_bytes,
            "activations": self.activation_bytes,
            "overhead": self.engine_bytes + unused,
        }
        return {**self.fit.model_dump(mode="json"), **parts, "total": sum(parts.values()), "source": self.engine.source}


def serving_memory(
    fit: Fit,
    config: Mapping[str, Any],
    geometry: Geometry,
    methods: Sequence[Method[Any]],
    quantize: Quantize | None = None,
) -> ServingMemory:
    """Return the memory beside the weights of a model compressed by these methods. `config`: the standard one.

    Caches that methods make smaller by ranks count as whole, except where an entry fixes their size (`cache_keep`).
    """
    engine = ENGINES[fit.engine, fit.device]
    cached = sum(
        numbers * fit.sequences * cached_tokens(config, layer, fit.context, engine.tokens or 0)
        for layer, numbers in cached_numbers(fit, geometry, methods).items()
    )
    tokens = fit.sequences * fit.context
    at_once = tokens if engine.tokens is None else min(tokens, engine.tokens)
    rows = fit.sequences if engine.logit_rows is None else engine.logit_rows
    numbers = max(live_numbers(layer) for layer in geometry.layers)
    head = geometry.vocab * geometry.hidden * geometry.bits // 8 if engine.copies_head else 0
    return ServingMemory(
        fit,
        math.ceil(cached * (engine.cache_bits or geometry.bits) / 8),
        math.ceil(at_once * numbers * geometry.bits / 8) + rows * geometry.vocab * engine.logit_bytes,
        engine.process_bytes + engine.token_bytes * geometry.vocab + head,
        _single_bytes(engine, geometry, quantize),
    )


def _single_bytes(engine: EngineMemory, geometry: Geometry, quantize: Quantize | None) -> int | None:
    """Return the bytes of the weights that the engine holds once; None if it holds no others."""
    if quantize is None or engine.copied_bits.isdisjoint(quantize.choices):
        return None
    return 0 if quantize.outer_roles else geometry.model_bytes() - geometry.decoder_bytes()


def cached_numbers(fit: Fit, geometry: Geometry, methods: Sequence[Method[Any]]) -> dict[int, float]:
    """Map each layer to the numbers that the engine caches for a token there."""
    cached: dict[int, float] = {layer.index: layer.cache_numbers for layer in geometry.layers}
    for method in methods:
        if not keeps_cache(fit, method):
            continue
        if (target := method.cache_target(geometry)) is not None:
            claimed = {group.layer for group in method.claims(geometry)}
            cached |= dict.fromkeys(claimed, target / len(claimed))
    return cached


def keeps_cache(fit: Fit, method: Method[Any]) -> bool:
    """Return True if the engine caches what a method's forms cache: transformers always, vLLM in ordinary models."""
    return fit.engine == "transformers" or (fit.engine == "vllm" and fit.device == "gpu" and method.own_class)


def cached_tokens(config: Mapping[str, Any], layer: int, context: int, at_once: int) -> int:
    """Return the tokens of a sequence that a layer caches: all, or those of its window and of a forward pass."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    if not window or (types and types[layer] != SLIDING):
        return context
    return int(min(context, window + at_once))


def live_numbers(layer: LayerGeometry) -> float:
    """Return the numbers of a token that are in memory at once, at the fullest point of a layer's forward pass."""
    width = sum(block.share * block.width for block in layer.mlps)
    attention = 2 * layer.query_features + 2 * layer.cache_numbers
    return 4 * layer.hidden + max(4 * width, attention)
