"""The memory of serving: caches of each engine, windows, and what a forward pass holds."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from manifests.engines import Engine
from manifests.fit import DEVICES, Fit
from manifests.quantize import Quantize
from pipeline.cost_model.serving_memory import ENGINES, cached_tokens, serving_memory
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.registry import build_methods
from tests import factories
from tests.families.geometries import manifest

CONFIG = standard_config(factories.make_config("llama", num_hidden_layers=2).to_dict())
GEOMETRY = geometry_of(CONFIG, 16)
DENSE = 2 * 2 * 2 * 32  # bytes of a token: 16 bits, two layers, keys and values, 32 numbers each


def cache(engine: Any, device: Any, entry: dict[str, Any] | None = None, bits: int = 16) -> float:
    """Return the cached bytes of a token."""
    methods = build_methods(manifest(entry, calibration={"text": {"files": ["t"]}})) if entry else ()
    fit = Fit(memory=1, context=1000, sequences=3, engine=engine, device=device)
    return serving_memory(fit, CONFIG, geometry_of(CONFIG, bits), methods).cache_bytes / 3000


@pytest.mark.parametrize(
    ("engine", "device", "method", "share"),
    [
        ("transformers", "gpu", "lorc", 0.5),
        ("transformers", "cpu", "mla", 0.5),
        ("vllm", "gpu", "lorc", 1.0),
        ("vllm", "gpu", "mla", 0.5),
        ("vllm", "cpu", "lorc", 1.0),
        ("llama.cpp", "gpu", "lorc", 1.0),
    ],
)
def test_a_smaller_cache_counts_where_the_engine_keeps_it(engine: str, device: str, method: str, share: float) -> None:
    assert cache(engine, device, {"method": method, "cache_keep": 0.5}) == pytest.approx(share * DENSE, abs=1e-3)


def test_llama_cpp_caches_16_bits_and_others_the_dtype_of_the_weights() -> None:
    sizes = {engine: cache(engine, "cpu", bits=32) for engine in ("transformers", "vllm", "llama.cpp")}
    assert sizes == {"transformers": 2 * DENSE, "vllm": 2 * DENSE, "llama.cpp": DENSE}


def test_layers_with_a_window_cache_it_and_the_tokens_of_a_forward_pass() -> None:
    config = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
    assert [cached_tokens(config, layer, 1000, 0) for layer in (0, 1)] == [100, 1000]
    assert cached_tokens(config, 0, 1000, 512) == 612
    assert cached_tokens({**config, "layer_types": None}, 1, 1000, 0) == 100
    assert cached_tokens({"sliding_window": None}, 0, 1000, 0) == 1000


def test_a_forward_pass_takes_all_prompts_or_as_many_tokens_as_the_engine_does() -> None:
    def activations(engine: Any, context: int) -> int:
        fit = Fit(memory=1, context=context, sequences=2, engine=engine, device="gpu")
        return serving_memory(fit, CONFIG, GEOMETRY, ()).activation_bytes

    assert activations("transformers", 10**5) > 9 * activations("transformers", 10**4)
    assert activations("vllm", 10**5) == activations("vllm", 10**4)
    assert {*ENGINES} == {(engine, device) for engine in get_args(Engine) for device in DEVICES}


@pytest.mark.parametrize(
    ("engine", "device", "quantize", "copied"),
    [
        ("llama.cpp", "cpu", {"bits": 4}, 1000),
        ("llama.cpp", "cpu", {"bits": 4, "what": "all"}, 1000 + GEOMETRY.model_bytes() - GEOMETRY.decoder_bytes()),
        ("llama.cpp", "cpu", {"bits": 8}, 0),
        ("llama.cpp", "gpu", {"bits": 4}, 0),
        ("transformers", "cpu", {"bits": 4, "levels": "normal"}, 0),
    ],
)
def test_llama_cpp_holds_codes_of_4_bits_twice_on_a_cpu(
    engine: Any, device: Any, quantize: dict[str, Any], copied: int
) -> None:
    fit = Fit(memory=10**9, context=10, sequences=2, engine=engine, device=device)
    memory = serving_memory(fit, CONFIG, GEOMETRY, (), Quantize(**quantize))
    weights = GEOMETRY.model_bytes() - GEOMETRY.decoder_bytes() + 1000
    assert memory.report(weights)["copies"] == copied
    enough = serving_memory(
        Fit(**{**fit.model_dump(), "memory": memory.needed(weights)}), CONFIG, GEOMETRY, (), Quantize(**quantize)
    )
    assert weights <= enough.weight_bytes <= weights + 1


@pytest.mark.parametrize(("engine", "head"), [("llama.cpp", 0), ("vllm", 2 * GEOMETRY.hidden)])
def test_a_vocabulary_takes_memory_beside_its_weights(engine: Any, head: int) -> None:
    """Of its text, its rows of logits, and in vLLM of the packed head."""

    def beside(vocab: int) -> int:
        fit = Fit(memory=1, context=1, sequences=3, engine=engine, device="cpu")
        return serving_memory(fit, CONFIG, geometry_of({**CONFIG, "vocab_size": vocab}, 16), ()).beside_weights

    rule = ENGINES[engine, "cpu"]
    assert beside(5000) - beside(1000) == 4000 * (3 * rule.logit_bytes + rule.token_bytes + head)
