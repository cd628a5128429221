"""Foreign attention in the served model: the numbers of transformers' own models, and caches that change none."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM, LayersConfig
from lamina.block_lamina import DEFAULT_BLOCK
from lamina.foreign_lamina import LATENTS, attend_whole
from tests.serving.serving_sources import padded_batch

BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")


def random_config(seed: int) -> dict[str, Any]:
    """The config of a DeepSeek model with dense MLPs: sizes odd and even, heads of any width, with and without YaRN."""
    random = Random(seed)
    heads, kind = random.choice((1, 2, 3, 4)), ("deepseek_v2", "deepseek_v3")[seed % 2]
    even = kind == "deepseek_v2"  # its module turns pairs of numbers as complex ones
    yarn = {
        "rope_type": "yarn", "rope_theta": random.choice((1e4, 5e5)), "factor": random.choice((2.0, 40.0)),
        "original_max_position_embeddings": random.choice((16, 64)), "mscale": random.choice((0.7, 1.0)),
        "mscale_all_dim": random.choice((0.0, 0.7, 1.0)), "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    config: dict[str, Any] = {
        "model_type": kind, "vocab_size": 97, "hidden_size": heads * random.choice((11, 16)),
        "intermediate_size": random.choice((33, 80)), "num_hidden_layers": 2, "first_k_dense_replace": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 128,
        "q_lora_rank": random.choice((None, 7, 16)), "kv_lora_rank": random.choice((6 if even else 5, 16)),
        "qk_nope_head_dim": random.choice((4 if even else 3, 8)), "qk_rope_head_dim": random.choice((2, 6, 8)),
        "v_head_dim": random.choice((1, 9, 16)), "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": random.choice((yarn, {"rope_type": "default", "rope_theta": 1e4})),
    }  # fmt: skip
    if config["model_type"] == "deepseek_v3":
        config["rope_interleave"] = random.random() < 0.7
    return config


def make_source(config: dict[str, Any]) -> Any:
    """A random model in float32, every parameter (norms and biases too) away from its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def describe(source: Any) -> dict[str, Any]:
    """The fields of Lamina's config for a DeepSeek model."""
    config = source.config
    attention = {role: f"self_attn.{role}" for role, _ in source.model.layers[0].self_attn.named_children()}
    other = {role: path for role, path in DEFAULT_BLOCK["modules"].items() if role not in ("q", "k", "v", "o")}
    biases = [role for role in BIASED if role in attention] if config.attention_bias else []
    fields = (*FIELDS, *(["rope_interleave"] if config.model_type == "deepseek_v3" else []))
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rope_parameters", "hidden_act", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {
        **{name: copy.deepcopy(getattr(config, name)) for name in names},
        "source_model_type": config.model_type,
        "head_dim": config.qk_rope_head_dim,
        "norm_eps": config.rms_norm_eps,
        "block": {**DEFAULT_BLOCK, "modules": {**other, **attention}, "biases": biases, "foreign": "self_attn"},
        "foreign": {"model_type": config.model_type, **{name: getattr(config, name) for name in fields}},
    }


def build(source: Any) -> Any:
    """Lamina's model with a source's tensors."""
    model: Any = LaminaForCausalLM(LaminaConfig(**describe(source))).eval()
    model.load_state_dict(source.state_dict(), strict=True)
    return model


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(20))
def test_logits_are_transformers_s(seed: int) -> None:
    """Of padded sequences, without a cache and token by token with one; under both implementations of attention."""
    source = make_source(random_config(seed))
    model = build(source)
    ids, mask = padded_batch()
    for implementation in ("sdpa", "eager"):
        source.set_attn_implementation(implementation)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            expected = source(ids, attention_mask=mask).logits[mask.bool()]
            logits = model(ids, attention_mask=mask).logits
            cache, steps = None, []
            for end in (*range(9, ids.shape[1]), ids.shape[1]):
                start = 0 if cache is None else end - 1
                out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits)
        largest = expected.abs().max()
        assert (logits[mask.bool()] - expected).abs().max() <= 2e-6 * largest
        assert (torch.cat(steps, dim=1)[mask.bool()] - expected).abs().max() <= 5e-6 * largest


@pytest.mark.parametrize("seed", [0, 1])
def test_generation_is_transformers_s(seed: int) -> None:
    """With growing and static caches; and a reloaded model gives the same."""
    source = make_source(random_config(seed))
    model = build(source)
    ids, mask = padded_batch()
    for cache in (None, "static"):
        options: dict[str, Any] = {
            "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache,
        }  # fmt: skip
        assert torch.equal(model.generate(ids, **options), source.generate(ids, **options))


def test_the_cache_holds_latents() -> None:
    model = build(make_source(random_config(1)))
    config = model.config
    with torch.no_grad():
        cache = model(torch.ones(1, 5, dtype=torch.long), use_cache=True).past_key_values
    cached = sum(tensor.numel() for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert cached == 5 * sum(config.cache_numbers(layer) for layer in range(2))


NARROW = {"kv_lora_rank": 4, "q_lora_rank": 6, "v_head_dim": 3}


def narrowed(seed: int) -> tuple[Any, Any]:
    """A source with narrow latents, and Lamina's model of a wider one with forms of these widths."""
    config = random_config(seed)
    config |= {name: width for name, width in NARROW.items() if config[name] is not None}
    source = make_source(config)
    fields = describe(source)
    forms = {
        role: {"form": "narrow", "rank": NARROW[name]}
        for name, roles in LATENTS.items()
        for role in roles
        if role in fields["block"]["modules"]
    }
    for role in LATENTS["kv_lora_rank"]:
        forms[role]["value_rank"] = NARROW["v_head_dim"]
    forms["o_proj"] = {"form": "narrow", "value_rank": NARROW["v_head_dim"]}
    wide = {name: 2 * width for name, width in NARROW.items() if fields["foreign"][name] is not None}
    fields |= {"foreign": {**fields["foreign"], **wide}, "forms": [forms] * 2}
    model: Any = LaminaForCausalLM(LaminaConfig(**fields)).eval()
    model.load_state_dict(source.state_dict(), strict=True)
    return source, model


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
def test_narrow_latents_are_those_of_a_narrow_source(seed: int) -> None:
    """With padding, and token by token with a cache, which is as large as the source's."""
    source, model = narrowed(seed)
    ids, mask = padded_batch()
    caches: list[Any] = [None, None]
    with torch.no_grad():
        for end in (*range(9, ids.shape[1]), ids.shape[1]):
            start = 0 if caches[0] is None else end - 1
            given = {"attention_mask": mask[:, :end], "use_cache": True}
            outs = [
                m(ids[:, start:end], past_key_values=c, **given) for m, c in zip((source, model), caches, strict=True)
            ]
            caches = [out.past_key_values for out in outs]
            seen = mask[:, start:end].bool()
            assert torch.equal(outs[0].logits[seen], outs[1].logits[seen])
    assert sum(layer.keys.shape[-1] + layer.values.shape[-1] for layer in caches[1].layers) == sum(
        model.config.cache_numbers(layer) for layer in range(2)
    )


@pytest.mark.parametrize("form", ["low_rank", "pivoted"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_factored_output_projection_is_its_product(form: str, seed: int) -> None:
    source = make_source(random_config(seed))
    fields = describe(source)
    group = {"group": "o_proj"} if form == "pivoted" else {}
    fields["forms"] = [{"o_proj": {"form": form, "rank": 3, **group}}] * 2
    model: Any = LaminaForCausalLM(LaminaConfig(**fields)).eval()
    weights = source.state_dict()
    for name, tensor in model.state_dict().items():
        if name in weights:
            tensor.copy_(weights[name])
        elif tensor.is_floating_point():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    for layer, dense in zip(model.model.layers, source.model.layers, strict=True):
        output = layer.self_attn.o_proj
        if form == "pivoted":
            product = output.pivoted(torch.eye(output.pivoted.rows.in_features)[None])["out"][0].T
        else:
            product = output.second.weight @ output.first.weight
        dense.self_attn.o_proj.weight.data.copy_(product.detach())
        if output.bias is not None:
            output.bias.data.copy_(dense.self_attn.o_proj.bias)
    ids, mask = padded_batch()
    with torch.no_grad():
        expected = source(ids, attention_mask=mask).logits[mask.bool()]
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
    assert (logits - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        ({"kv_b_proj": {"form": "narrow", "rank": 4}}, "needs the same on kv_a_proj_with_mqa, which has none"),
        ({"kv_b_proj": {"form": "narrow", "rank": 17}}, "rank 17, allowed is 1 to kv_lora_rank 16"),
        ({"kv_b_proj": {"form": "low_rank", "rank": 4}}, "low_rank is for q, k, v, o"),
        ({"o_proj": {"form": "narrow", "rank": 4}}, "has value_rank and no rank for o_proj"),
        ({"o_proj": {"form": "narrow", "value_rank": 1}}, "value_rank None of kv_b_proj, but 1 of o_proj"),
        ({"o_proj": {"form": "low_rank", "rank": 3, "value_rank": 99}}, "value_rank 99, allowed is 1 to"),
        ({"up": {"form": "narrow", "rank": 4}}, "narrow is for kv_a_proj_with_mqa"),
        ({"kv_b_proj": {"form": "narrow", "rank": 5}}, "rank 5, of which deepseek_v2 needs a multiple of 2"),
        ({"o_proj": {"form": "low_rank", "rank": 100}}, "rank 100, allowed is 1 to min"),
    ],
)
def test_wrong_forms_are_named(forms: Any, said: str) -> None:
    config = random_config(0) | {"kv_lora_rank": 16}
    with pytest.raises(ValueError, match=said):
        LayersConfig(**{**describe(make_source(config)), "forms": [forms, {}]})


def test_a_config_is_written_and_read(tmp_path: Any) -> None:
    """A copy of the model too."""
    model = build(make_source(random_config(3)))
    model.save_pretrained(tmp_path)
    again = LaminaForCausalLM.from_pretrained(tmp_path).eval()
    ids, _ = padded_batch()
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected)
        assert torch.equal(copy.deepcopy(model)(ids).logits, expected)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("foreign", {}, "foreign.model_type is None, this version knows deepseek_v2, deepseek_v3"),
        ("foreign", {"model_type": "llama"}, "foreign.model_type is 'llama'"),
        ("foreign", {"model_type": "deepseek_v2", "q_lora_rank": 3}, "foreign lacks kv_lora_rank, qk_nope_head_dim"),
        ("foreign", 5, "foreign is 5, not a dict"),
        ("block", {"foreign": None}, "block lacks modules.q, modules.k, modules.v, modules.o"),
        ("block", {"foreign": 3}, "block.foreign is 3"),
    ],
)
def test_wrong_descriptions_are_named(field: str, value: Any, said: str) -> None:
    fields = describe(make_source(random_config(1)))
    changed = {**fields[field], **value} if field == "block" else value
    with pytest.raises(ValueError, match=said):
        LayersConfig(**{**fields, field: changed})


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("width", "value_width"), [(10, 6), (6, 10), (8, 8)])
def test_attention_of_whole_sequences_is_that_of_heads_of_unequal_width(
    width: int, value_width: int, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = (width, width, value_width)
    query, key, value = (torch.randn(2, 3, tokens, w, generator=generator, dtype=torch.float64) for w in widths)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    heads, _ = attend_whole(torch.nn.Module(), query, key, value, None, 0.3)
    torch.testing.assert_close(heads, (scores.softmax(-1) @ value).transpose(1, 2))
