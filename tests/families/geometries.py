"""Creates geometries and manifests for tests, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from manifests.loading import parse_manifest
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of, standard_config
from tests import factories

NO_BYTES: Mapping[str, tuple[int, bool]] = MappingProxyType({})
SIZES: dict[str, dict[str, Any]] = {
    # D, N, L, H, G, d: d is D / H in some, not in others.
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 12},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "wide-heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 40, "intermediate_size": 100},
}

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def llama(
    name: str = "gqa", bits: int = 16, stored_bytes: Mapping[str, tuple[int, bool]] = NO_BYTES, **overrides: Any
) -> Geometry:
    """Return a small Llama geometry: D 48, N 80, L 6. `stored_bytes`: as `SourceCheckpoint.stored_bytes`."""
    sizes = {
        name: value for name, value in factories.GEOMETRY.items() if name not in ("head_dim", "num_key_value_heads")
    }
    config = {**sizes, "model_type": "llama", "num_hidden_layers": 6, "max_position_embeddings": 64}
    return geometry_of(standard_config({**config, **SIZES[name], **overrides}), bits, stored_bytes=stored_bytes)


def other(model_type: str, bits: int = 16) -> Geometry:
    """Return a small geometry of a family without a gated MLP (`opt`, `gptj`), or with other biases or norms."""
    return geometry_of(standard_config(factories.make_config(model_type, num_hidden_layers=6).to_dict()), bits)


def alone(layer: LayerGeometry) -> Geometry:
    """Return a geometry with this layer alone, as the first."""
    return Geometry(layer.model_type, layer.hidden, 100, False, "model.layers", (replace(layer, index=0),), ())


def manifest(*methods: dict[str, Any], keep: float | None = None, scope: str = "decoder", **fields: Any) -> Manifest:
    """Return a manifest of entries, which are flat_llm's unless they name a method; by default, one with defaults."""
    document = {
        "version": 1,
        "model": {"source": "model"},
        "output": "out",
        "run_dir": "run",
        "budget": None if keep is None else {"keep": keep, "scope": scope},
        "methods": [{"method": "flat_llm", **method} for method in methods or ({},)],
        **fields,
    }
    return parse_manifest(document)
