"""A single layer on its own, as the compress side runs it; and the errors of a configuration that does not fit."""

from typing import Any

import pytest
import torch
from torch.nn.functional import embedding
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lamina import LaminaConfig
from lamina.block_lamina import BLOCK_DEFAULTS
from lamina.inputs_lamina import default_position_ids, prepare_layer_inputs
from lamina.layers_lamina import LaminaDecoderLayer
from lamina.norms_lamina import make_norm
from lamina.rotary_lamina import LaminaRotaryEmbedding, make_rotary
from tests.serving import serving_factors as kinds
from tests.serving.serving_compressed import MIXED, compress, forms_for
from tests.serving.serving_factors import factored
from tests.serving.serving_sources import SOURCES, build, describe, layer_prefix, make_source, padded_batch

pytestmark = pytest.mark.sample(3)


def streamed_hidden(
    config: LaminaConfig, tensors: dict[str, torch.Tensor], prefixes: list[str], ids_BT: torch.Tensor, mask_BT: Any
) -> torch.Tensor:
    """The final hidden states, one layer in memory at a time: no model is ever built."""
    block = config.block
    hidden_BTD = embedding(ids_BT, tensors[block["embed"] + ".weight"])
    if scale := block["embed_scale"]:
        factor = config.hidden_size**0.5 if isinstance(scale, str) else scale
        hidden_BTD = hidden_BTD * torch.tensor(factor, dtype=hidden_BTD.dtype)
    positions = default_position_ids(config, hidden_BTD, mask_BT)
    if block["positions"]:
        table = tensors[block["positions"]["module"] + ".weight"]
        hidden_BTD = hidden_BTD + embedding(positions + block["positions"]["offset"], table)
    inputs = prepare_layer_inputs(config, make_rotary(config), hidden_BTD, mask_BT, position_ids=positions)
    for layer_idx, prefix in enumerate(prefixes):
        with torch.device("meta"):
            layer = LaminaDecoderLayer(config, layer_idx)
        mine = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        layer.load_state_dict(mine, strict=True, assign=True)
        layer.eval().requires_grad_(False)
        hidden_BTD = layer(hidden_BTD, **inputs.of(layer))
    norm = make_norm(config)
    norm.load_state_dict({key: tensors[f"{block['final_norm']}.{key}"] for key in norm.state_dict()}, assign=True)
    out_BTD = norm(hidden_BTD)
    assert isinstance(out_BTD, torch.Tensor)
    return out_BTD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "compressed"])
@pytest.mark.parametrize("name", SOURCES)
def test_streamed_layers_are_the_model(name: str, kind: str, dtype: torch.dtype) -> None:
    source = make_source(name)
    forms = forms_for(source.config, MIXED) if kind == "compressed" else None
    tensors = source.state_dict()
    if forms:
        tensors = compress(source.config, tensors, forms)[0]
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    model = build(source.config, tensors, forms).to(dtype)
    if model.base_model.rotary_emb is not None:  # .to(bfloat16) rounds the angles' frequencies, loading does not
        model.base_model.rotary_emb = make_rotary(model.config)
    prefixes = [layer_prefix(source.config, i) for i in range(3)]
    ids_BT, mask_BT = padded_batch()
    for mask in (mask_BT, None):
        with torch.no_grad():
            whole = model.base_model(ids_BT, attention_mask=mask).last_hidden_state
            assert torch.equal(streamed_hidden(model.config, tensors, prefixes, ids_BT, mask), whole)


def test_a_layer_without_attention_implementation_is_refused() -> None:
    config = LaminaConfig(**describe(make_source("llama-gqa").config))
    with pytest.raises(ValueError, match="_attn_implementation"):
        prepare_layer_inputs(config, LaminaRotaryEmbedding(config), torch.zeros(1, 4, 48))


PCA = {"form": "head_pca", "rank": 5}
PRUNED = {"form": "pruned", "rank": 9}
BAD_FORMS = [
    ([{}, {}], "2 entries for 3 layers"),
    ([{}, {"v": {"form": "svd", "rank": 3}}, {}], "layer 1, v: unknown form 'svd'"),
    ([{}, {"v": {"rank": 3}}, {}], "layer 1, v: unknown form None"),
    ([{}, {}, {"v": {**PCA, "rank": 13}, "o": {**PCA, "rank": 13}}], "layer 2, v: head_pca rank 13, .* head_dim 12"),
    ([{"v": {**PCA, "rank": 0}, "o": {**PCA, "rank": 0}}, {}, {}], "layer 0, v: head_pca rank 0"),
    ([{"q": {"form": "head_low_rank", "rank": 2.0}}, {}, {}], "layer 0, q: head_low_rank rank 2.0"),
    ([{"q": {"form": "head_low_rank"}}, {}, {}], "layer 0, q: head_low_rank rank None"),
    ([{"k": {"form": "head_low_rank", "rank": 13}}, {}, {}], "layer 0, k: head_low_rank rank 13"),
    ([{"v": PCA}, {}, {}], r"layer 0: different value heads of v 5 \(head_pca\), o 12 \(dense\)"),
    ([{"v": PCA, "o": {**PCA, "rank": 4}}, {}, {}], "layer 0: different value heads of v 5 .*, o 4"),
    ([{"gate": PRUNED, "down": PRUNED}, {}, {}], "layer 0: different channels: gate 9 .*, up 80"),
    ([{r: {**PRUNED, "rank": 81} for r in ("gate", "up", "down")}, {}, {}], "layer 0, gate: .* intermediate_size 80"),
    ([{"q": PCA}, {}, {}], "layer 0, q: head_pca is for v, o"),
    ([{"q": {"form": "dense", "rank": 3}}, {}, {}], "layer 0, q: dense has no rank"),
    ([{"q_norm": {"form": "dense"}}, {}, {}], "layer 0, q_norm: block.modules has no such role"),
]


@pytest.mark.parametrize(("forms", "message"), BAD_FORMS)
def test_forms_that_do_not_fit(forms: list[dict[str, Any]], message: str) -> None:
    fields = describe(make_source("llama-gqa").config)
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**{**fields, "forms": forms})


def _without(block: dict[str, Any], *roles: str) -> dict[str, Any]:
    return {**block, "modules": {role: path for role, path in block["modules"].items() if role not in roles}}


BAD_BLOCKS = [
    (lambda b: {**b, "norm": "batch"}, "block.norm is 'batch'"),
    (lambda b: {**b, "rotary": "spiral"}, "block.rotary is 'spiral'"),
    (lambda b: {**b, "embed_scale": 0}, "block.embed_scale is 0"),
    (lambda b: {**b, "embed_scale": "2"}, "block.embed_scale is '2'"),
    (lambda b: {**b, "norm_offset": True}, "block.norm_offset is True"),
    (lambda b: {**b, "norm": "layer", "norm_offset": 1.0}, "block.norm_offset is 1.0, .* unless norm is 'rms'"),
    (lambda b: {**b, "attention_softcap": 0.0}, "block.attention_softcap is 0.0, allowed are null and a positive"),
    (lambda b: {**b, "residual_scale": "a"}, "block.residual_scale is 'a'"),
    (lambda b: {**b, "head_norms": "both"}, "block.head_norms is 'both'"),
    (lambda b: {**b, "rotary_layers": [1, 0]}, r"block.rotary_layers is \[1, 0\], not 1 or 0 for each of 3 layers"),
    (lambda b: {**b, "rotary_layers": "every_other"}, "block.rotary_layers is 'every_other'"),
    (lambda b: _without(b, "input_norm"), "lacks input_norm, which only a block with attention_out_norm can do"),
    (lambda b: {**b, "experts": 8}, "unknown experts"),
    (lambda b: _without(b, "q", "down"), "lacks modules.q, modules.down"),
    (lambda b: _without(b, "mlp_norm"), "lacks mlp_norm"),
    (lambda b: {**b, "biases": ["q", "input_norm"]}, "biases names input_norm"),
    (lambda b: {**b, "final_norm": "norm"}, "below one base module"),
    (lambda b: {**b, "embed": "other.embed_tokens"}, "below one base module"),
    (lambda b: {**b, "modules": {**b["modules"], "q": "q_proj"}}, "below one attention module"),
    (lambda b: {k: v for k, v in b.items() if k != "head"}, "block lacks head"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BLOCKS)
def test_blocks_that_cannot_be_built(change: Any, message: str) -> None:
    fields = describe(make_source("llama-gqa").config)
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**{**fields, "block": change(fields["block"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types must be 3 of"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must be 3 of"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is null"),
        ({"num_key_value_heads": 4}, "num_attention_heads: 6 is not a multiple of num_key_value_heads: 4"),
    ],
)
def test_fields_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    fields = describe(make_source("llama-gqa").config)
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**{**fields, **change})


def test_configuration_survives_json() -> None:
    for name in SOURCES:
        source = make_source(name).config
        fields = describe(source, forms_for(source, MIXED))
        config = LaminaConfig(**fields)
        again = LaminaConfig.from_dict(config.to_diff_dict())
        assert again.to_dict() == config.to_dict()
        assert again.to_dict()["block"] == BLOCK_DEFAULTS | fields["block"]
        assert {key: again.to_dict()[key] for key in ("forms", "auto_map")} == {
            key: fields[key] for key in ("forms", "auto_map")
        }
        assert (again.rope_parameters is None) == (fields["block"]["rotary"] is None)


def test_tensor_parallel_plan() -> None:
    source = make_source("gptj").config
    assert LaminaConfig(**describe(source)).base_model_tp_plan == {
        "h.*.attn.q_proj": "colwise",
        "h.*.attn.k_proj": "colwise",
        "h.*.attn.v_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    }
    assert LaminaConfig(**describe(source, forms_for(source, MIXED))).base_model_tp_plan == {  # has head_low_rank
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    }


def test_the_mlp_norm_of_a_parallel_block() -> None:
    """GPT-NeoX' arrangement, x + attn(ln1(x)) + mlp(ln2(x)), comes with the data."""
    source = make_source("llama-gqa")
    fields = describe(source.config)
    config = LaminaConfig(**{**fields, "block": {**fields["block"], "parallel": True}, "attn_implementation": "sdpa"})
    layer = LaminaDecoderLayer(config, 0).eval()
    prefix = layer_prefix(source.config, 0)
    tensors = {k.removeprefix(prefix): t for k, t in source.state_dict().items() if k.startswith(prefix)}
    layer.load_state_dict(tensors)
    hidden_BTD = torch.randn(2, 5, 48)
    inputs = prepare_layer_inputs(config, LaminaRotaryEmbedding(config), hidden_BTD)
    theirs = source.model.layers[0]
    with torch.no_grad():
        attention, _ = theirs.self_attn(
            hidden_states=theirs.input_layernorm(hidden_BTD),
            position_embeddings=inputs.of(layer)["position_embeddings"],
            attention_mask=None,
        )
        expected = hidden_BTD + attention + theirs.mlp(theirs.post_attention_layernorm(hidden_BTD))
        assert torch.allclose(layer(hidden_BTD, **inputs.of(layer)), expected, atol=1e-5)


@torch.no_grad()
def test_an_attention_function_may_give_heads_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's does: (B, T, H·d), where transformers' give (B, T, H, d)."""
    model, _ = factored("llama-gqa", kinds.dense, 0.5)
    ids = torch.arange(4, 12)[None]
    expected = model(ids).logits

    def flat(*args: Any, **kwargs: Any) -> Any:
        heads, weights = sdpa_attention_forward(*args, **kwargs)
        return heads.flatten(2), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", flat)
    torch.testing.assert_close(model(ids).logits, expected)
