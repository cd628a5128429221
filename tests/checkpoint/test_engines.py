"""The card's table of engines, for checkpoints of different forms, sizes and rounding."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.checkpoint.engines import engine_table
from pipeline.checkpoint.model_card import model_card
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import forms_of
from tests.serving.serving_sources import describe, make_source

ROUNDED = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": None}}},
}
TABLES = {"model.layers.0.self_attn.q_proj": {"bits": 4, "group": 32, "levels": "learned"}}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 10000.0, "factor": 2.0}
BY_CHANNELS = [{}, {"intermediate_size": 24}, {}]
BY_HEADS = [{}, {"num_key_value_heads": 1}, {}]


def pruned(sizes: Any, share: float) -> dict[str, Any]:
    """Half of the channels."""
    return {role: {"form": "pruned", "rank": sizes.inner // 2} for role in ("gate", "up", "down")}


def table(kind: Any, source: str = "llama-gqa", share: float = 0.5, cache: float = 1.0, **fields: Any) -> list[str]:
    """The cells that say what is saved: transformers, vLLM twice, llama.cpp if it is there, any other."""
    config = make_source(source).config
    text = engine_table({**describe(config, forms_of(config, kind, share)), **fields}, cache)
    return [line.split(" | ", 2)[2].removesuffix(" |") for line in text.splitlines()[2:]]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            table(kinds.dense),
            ["weights; nothing of the cache"] * 3 + ["nothing"] * 2,
        ),
        (
            table(kinds.latent_both, cache=0.4),
            ["weights; 60% of the cache", *["weights; nothing of the cache"] * 2, "nothing", "nothing"],
        ),
        (
            table(kinds.absorbed, share=0.8)[1:3],
            [
                "weights; the cache is larger than the dense model's: heads of 32 numbers, not 12",
                "not served: value heads wider than key heads",
            ],
        ),
        (table(kinds.tucker)[1:3], ["weights; nothing of the cache", "weights; nothing of the cache; one device"]),
        (table([pruned, kinds.dense, kinds.dense])[3:], ["narrower MLPs", "nothing"]),
        (table(pruned)[3:], ["narrower MLPs"] * 2),
        (table(kinds.dense, layer_sizes=BY_CHANNELS), ["weights; nothing of the cache"] * 3),
        (table(kinds.dense, layer_sizes=BY_HEADS)[2], "not served: layers with different heads"),
        (
            table(pruned, quantization_config=ROUNDED),
            [
                "on the disk, and in memory until the first token, which dequantizes all weights; nothing of the cache",
                "weights, if vLLM has a kernel for their bits and widths; nothing of the cache",
                "weights; fails if vLLM has no kernel for their bits and widths; nothing of the cache",
                "narrower MLPs; codes of 8 and 4 bits of matrices that are not factored",
                "narrower MLPs; codes of matrices that are not factored",
            ],
        ),
        (
            table(pruned, level_tables=TABLES),
            [
                "on the disk and in memory; each product looks levels up in tables, which takes time; "
                "nothing of the cache",
                "on the disk; levels in tables are multiplied out when vLLM loads the model; nothing of the cache",
                "not served: codes that stand for levels in a table",
                *["narrower MLPs"] * 2,
            ],
        ),
        (
            table(pruned, level_tables={"q": {"bits": 4, "group": 64, "levels": "normal"}})[-1],
            "narrower MLPs; NF4 codes, for bitsandbytes, of matrices that are not factored",
        ),
        (
            table(pruned, level_tables={"q": {"bits": 4, "group": 64, "levels": "iq4_nl"}})[3:],
            ["narrower MLPs; codes of 8 and 4 bits of matrices that are not factored", "narrower MLPs"],
        ),
        (
            table(pruned, level_tables=TABLES, quantization_config=ROUNDED)[0],
            "on the disk and in memory; each product looks levels up in tables, which takes time; with uniform levels "
            "on the disk, and in memory until the first token, which dequantizes these weights; nothing of the cache",
        ),
        (
            table(kinds.dense, rope_parameters=PROPORTIONAL)[1],
            "not served: rope_type proportional: vLLM ignores its factor 2",
        ),
        (len(table(kinds.dense, "opt-tied")), 4),  # llama.cpp has no place for it
    ],
)
def test_what_is_saved(found: Any, said: Any) -> None:
    assert found == said


def test_rounded_weights_need_a_package() -> None:
    config = make_source("llama-gqa").config
    text = engine_table({**describe(config, forms_of(config, kinds.dense, 1.0)), "quantization_config": ROUNDED}, 1.0)
    assert "after `pip install 'compressed-tensors>=0.20'`" in text


@pytest.mark.parametrize(
    ("methods", "quantize", "title"),
    [
        ([{"method": "lorc"}, {"method": "svd"}], None, "# x, compressed with lorc, svd\n"),
        ([], {"bits": 3}, "# x, rounded to 3 bits\n"),
        ([], {"bits": 4, "levels": "normal"}, "# x, rounded to 4 bits with normal levels\n"),
        ([], {"bits": 4, "levels": "auto"}, "# x, rounded to 4 bits with chosen levels\n"),
        ([{"method": "svd", "refine": {"steps": 5}}], None, "# x, compressed with svd, refined layer by layer\n"),
        ([{"method": "flat_llm"}], {"bits": "auto"}, "# x, compressed with flat_llm, rounded to chosen bits\n"),
    ],
)
def test_the_title(methods: list[Any], quantize: Any, title: str) -> None:
    config, pair = make_source("llama-gqa").config, {"dense": 4, "compressed": 4}
    cost = dict.fromkeys(("weights", "products", "cached", "cached_products"), 4)
    record = {
        "counts": dict.fromkeys(("parameters", "decoder_parameters", "bytes", "cache_bytes_per_token"), pair),
        "manifest": {"methods": methods, "quantize": quantize},
        "code_version": "1",
        "source": {"model_type": "llama", "path": "/x"},
        "decoding": {"dense": cost, "compressed": cost},
        "layers": [],
    }
    assert title in model_card(record, describe(config, forms_of(config, kinds.dense, 1.0)))


@pytest.mark.parametrize(
    ("width", "where"),
    [
        (92, "on a GPU alone"),
        (
            96,
            'on a CPU `VLLM_MLA_DISABLE=1 vllm serve PATH --compilation-config \'{"custom_ops": ["-rotary_embedding"]',
        ),
    ],
)
def test_latent_attention_is_served_on_a_cpu_where_its_heads_have_a_kernel(width: int, where: str) -> None:
    assert where in engine_table({"model_type": "deepseek_v3", "qk_head_dim": width}, 0.5)
