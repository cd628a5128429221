"""Foreign attention: sizes of latent attention, faults of its fields, and the layers of hybrids."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.errors import InputError
from pipeline.families import foreign
from pipeline.families.foreign import ForeignBlock, ForeignFamily, latent_attention, latent_faults, sequence_limit

FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3", "kv_lora_rank": 7, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
    "q_lora_rank": 5, "attention_bias": False, "rope_interleave": True,
}  # fmt: skip
HIDDEN, HEADS = 16, 3


def shapes_of(block: ForeignBlock) -> dict[str, tuple[int, ...]]:
    return {f"{each.role}.{name}": shape for each in block.copied for name, shape in each.shapes}


def test_the_tensors_of_latent_attention() -> None:
    block = latent_attention(FIELDS, HIDDEN, HEADS, ())
    assert shapes_of(block) == {
        "q_a_proj.weight": (5, 16), "q_a_layernorm.weight": (5,), "q_b_proj.weight": (18, 5),
        "kv_a_proj_with_mqa.weight": (9, 16), "kv_a_layernorm.weight": (7,), "kv_b_proj.weight": (21, 7),
        "o_proj.weight": (16, 9),
    }  # fmt: skip
    assert (block.query_features, block.cache_numbers, block.heads) == (18, 9, 3)
    assert block.scores == ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    assert {each.role for each in block.copied if each.reads == "attention.in"} == {"q_a_proj", "kv_a_proj_with_mqa"}
    assert block.block is not None
    assert [latent.field for latent in block.block.latents if latent.cached] == ["kv_lora_rank"]
    assert len(block.block.latents) == 2


def test_queries_without_a_latent() -> None:
    block = latent_attention({**FIELDS, "q_lora_rank": None}, HIDDEN, HEADS, ("o_proj", "q_proj"))
    shapes = shapes_of(block)
    assert shapes["q_proj.weight"] == (18, 16)
    assert (shapes["q_proj.bias"], shapes["o_proj.bias"]) == ((18,), (16,))
    assert not any("q_a" in name or "q_b" in name for name in shapes)
    assert block.scores[0] == "q_proj"
    assert block.block is not None
    assert [latent.field for latent in block.block.latents] == ["kv_lora_rank"]
    assert block.block.writer.bias


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("kv_lora_rank", 0, "kv_lora_rank: 0 is not a positive integer"),
        ("qk_rope_head_dim", True, "qk_rope_head_dim: True is not"),
        ("v_head_dim", 3.0, "v_head_dim: 3.0 is not"),
        ("q_lora_rank", "5", "q_lora_rank: '5' is not"),
        ("attention_bias", None, "attention_bias: None is neither true nor false"),
        ("rope_interleave", 1, "rope_interleave: 1 is neither"),
    ],
)
def test_a_field_from_which_no_module_is_built(field: str, value: Any, fault: str) -> None:
    faults = latent_faults({**FIELDS, field: value})
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_fields_without_fault() -> None:
    assert latent_faults(FIELDS) == []
    assert latent_faults({**FIELDS, "q_lora_rank": None}) == []
    del (fields := dict(FIELDS))["rope_interleave"]
    assert latent_faults(fields) == []


def test_odd_sizes_are_refused_where_pairs_are_complex_numbers() -> None:
    odd, even = {**FIELDS, "qk_nope_head_dim": 5}, {**FIELDS, "kv_lora_rank": 8}
    assert foreign._even_faults(even) == []
    assert [fault.partition(" is odd")[0] for fault in foreign._even_faults(odd)] == [
        "kv_lora_rank: 7", "qk_nope_head_dim: 5",
    ]  # fmt: skip
    assert foreign._even_faults({**odd, "v_head_dim": 0}) == ["v_head_dim: 0 is not a positive integer"]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        (None, ("max_position_embeddings", 64)),
        ({"indexer_types": ["full", "full"], "index_topk": 16}, ("max_position_embeddings", 64)),
        ({"indexer_types": ["full", "shared"], "index_topk": 16}, ("index_topk", 16)),
        ({"indexer_types": ["full", "shared"], "index_topk": 2048}, ("max_position_embeddings", 64)),
        ({"indexer_types": None}, ("max_position_embeddings", 64)),
    ],
)
def test_the_longest_sample(fields: dict[str, Any] | None, limit: tuple[str, int]) -> None:
    assert sequence_limit({"max_position_embeddings": 64, "foreign": fields}) == limit


def block(sizes: Any) -> ForeignBlock:
    return ForeignBlock(None, (), (), sizes["heads"], sizes["num_hidden_layers"])


def hybrid(*types: str, kinds: Any = None) -> ForeignFamily:
    return ForeignFamily("qwen3_next", None, "", lambda _: [], dict.fromkeys(types, block), kinds)


def test_a_hybrid_has_the_block_of_the_layer_s_type() -> None:
    standard = {
        "layer_types": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3, "foreign": {"heads": 5},
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    family = hybrid("linear_attention", "full_attention")
    blocks = [family.block_of(standard, layer) for layer in range(3)]
    assert [each and (each.heads, each.query_features) for each in blocks] == [(5, 3), (5, 3), None]  # fields of both
    assert [each and each.cache_numbers for each in blocks] == [0, 32, None]


def test_types_of_layers() -> None:
    standard = {"num_hidden_layers": 3, "foreign": {"pattern": "M*M"}}
    assert hybrid("chunked").layer_types(standard) == ["chunked"] * 3
    assert hybrid("linear", "full").layer_types(standard) is None
    kinds = ("pattern", {"M": "linear", "*": "full"})
    assert hybrid("linear", "full", kinds=kinds).layer_types(standard) == ["linear", "full", "linear"]
    with pytest.raises(InputError, match="pattern: has 3 entries for 4 layers"):
        hybrid("linear", "full", kinds=kinds).layer_types({**standard, "num_hidden_layers": 4})
