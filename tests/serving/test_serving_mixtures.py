"""Mixtures of experts compute what transformers' own classes compute, whatever their router and sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.mixture_lamina import Router, check_mixture, layer_modules, mixture_of, passing
from pipeline.families.registry import checkpoint_config, geometry_of, standard_config
from pipeline.inputs.sources import open_dense
from pipeline.kernels.routing import RoutingRule, route
from tests import factories

CHUNKS: dict[str, list[Any]] = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [0, 1]}
LIMIT = 2e-6  # of the largest logit
ROUTER: dict[str, Any] = {
    "score": "softmax", "float_logits": False, "groups": 1, "top_groups": 1, "group_score": "max",
    "renormalise": True, "scale": 1.0, "logit_bias": False,
}  # fmt: skip


def random_sizes(family: str, seed: int) -> dict[str, Any]:
    """Sizes of a random mixture: 2 to 64 experts of odd widths, of which a token passes 1 to 8."""
    draw = random.Random(f"{family}/{seed}")
    experts = draw.choice([2, 3, 8, 17, 64])
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3, "hidden_act": draw.choice(["silu", "gelu_new"]),
        "num_experts_per_tok": draw.randint(1, min(8, experts)), "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    if family in ("mixtral", "minimax_m2", "gpt_oss", "granitemoe"):
        return {**sizes, "num_local_experts": experts, "intermediate_size": draw.choice([5, 24, 33])}
    if family == "hunyuan_v1_moe":
        top_k = sizes.pop("num_experts_per_tok")
        sizes |= {"num_experts": experts, "moe_topk": draw.choice([top_k, [top_k, 1, top_k]])}
        return sizes | {"intermediate_size": draw.choice([5, 24, 33]), "attention_bias": draw.random() < 0.5}
    if family in factories.CHUNKED:
        layers = {name: [draw.choice(values) for _ in range(3)] for name, values in CHUNKS.items()}
        sizes |= {"num_local_experts": experts, "intermediate_size": draw.choice([5, 24, 33])}
        sizes |= draw.choice(
            [{"moe_layers": [0, 2]}, {"moe_layers": None, "interleave_moe_layer_step": draw.choice([1, 2])}]
        )
        sizes |= {name: draw.random() < 0.5 for name in ("use_qk_norm", "attn_temperature_tuning", "attention_bias")}
        return sizes | layers | {"attention_chunk_size": draw.choice([5, 100]), "intermediate_size_mlp": 33}
    if family == "kimi_linear":
        return kimi_sizes(draw)
    if family == "nemotron_h":
        return nemotron_sizes(draw)
    if family in factories.HYBRIDS:
        return hybrid_sizes(family, draw)
    if family in ("glm4_moe", "dots1", "solar_open", *factories.FOREIGN, *factories.INDEXED):
        return sizes | grouped_sizes(family, draw)
    sizes |= {"num_experts": experts, "moe_intermediate_size": draw.choice([5, 24, 33])}
    sizes |= draw.choice([{"mlp_only_layers": [draw.randrange(3)]}, {"decoder_sparse_step": 2, "mlp_only_layers": []}])
    sizes["norm_topk_prob"] = draw.random() < 0.5
    if family == "qwen2_moe":
        sizes |= {"shared_expert_intermediate_size": draw.choice([7, 24]), "qkv_bias": draw.random() < 0.5}
    return sizes


def hybrid_sizes(family: str, draw: random.Random) -> dict[str, Any]:
    """Sizes of a random hybrid with three layers."""
    keys, times = draw.choice([1, 2, 3]), draw.choice([1, 2])
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3, "linear_num_key_heads": keys, "linear_num_value_heads": keys * times,
        "linear_key_head_dim": draw.choice([3, 8]), "linear_value_head_dim": draw.choice([5, 8]),
        "linear_conv_kernel_dim": draw.choice([2, 4]), "attention_bias": draw.random() < 0.5,
        "layer_types": [draw.choice(factories.DELTA["layer_types"]) for _ in range(2)] + ["full_attention"],
        "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    if family == "qwen3_5_text":
        return sizes | {"intermediate_size": draw.choice([33, 80])}
    experts = draw.choice([2, 8, 17])
    sizes |= {"num_experts": experts, "num_experts_per_tok": draw.randint(1, min(8, experts))}
    if family == "qwen3_next":
        sizes |= {"norm_topk_prob": draw.random() < 0.5, "mlp_only_layers": draw.choice([[], [0], [2]])}
    return sizes | {
        "moe_intermediate_size": draw.choice([5, 24]),
        "shared_expert_intermediate_size": draw.choice([7, 24]),
    }


def kimi_sizes(draw: random.Random) -> dict[str, Any]:
    """Sizes of a random Kimi-Linear."""
    grouped = grouped_sizes("kimi_linear", draw)
    grouped["num_local_experts"] = grouped.pop("n_routed_experts")
    return grouped | {
        "linear_num_heads": draw.choice([1, 3]), "linear_head_dim": draw.choice([3, 8]),
        "linear_conv_kernel_dim": draw.choice([2, 4]), "attention_bias": draw.random() < 0.5,
        "layer_types": [draw.choice(factories.DELTA["layer_types"]) for _ in range(2)] + ["full_attention"],
    }  # fmt: skip


def nemotron_sizes(draw: random.Random) -> dict[str, Any]:
    """Sizes of a random Nemotron-H of five layers."""
    grouped, groups = grouped_sizes("nemotron_h", draw), draw.choice([1, 2])
    del grouped["n_shared_experts"], grouped["first_k_dense_replace"]
    kinds = ("linear_attention", "moe", "full_attention", "mlp")
    return grouped | {
        "layers_block_type": [draw.choice(kinds) for _ in range(4)] + ["full_attention"],
        "mamba_num_heads": groups * draw.choice([1, 3]), "n_groups": groups, "mamba_head_dim": draw.choice([3, 8]),
        "ssm_state_size": draw.choice([5, 8]), "conv_kernel": draw.choice([2, 4]), "chunk_size": draw.choice([7, 64]),
        "use_bias": draw.random() < 0.5, "use_conv_bias": draw.random() < 0.5,
        "moe_shared_expert_intermediate_size": draw.choice([7, 24]), "tie_word_embeddings": draw.random() < 0.5,
        "mlp_hidden_act": draw.choice(["relu2", "silu"]),
    }  # fmt: skip


def grouped_sizes(family: str, draw: random.Random) -> dict[str, Any]:
    """Sizes of a random mixture with dense first layers, shared experts, and experts in groups."""
    size, groups = draw.choice([2, 3, 8]), draw.choice([1, 2, 4])
    top_groups = draw.randint(1, groups)
    sizes: dict[str, Any] = {
        "n_routed_experts": size * groups, "n_group": groups, "topk_group": top_groups,
        "num_experts_per_tok": draw.randint(1, min(8, size * top_groups)), "n_shared_experts": draw.choice([1, 2, 3]),
        "moe_intermediate_size": draw.choice([5, 24]), "first_k_dense_replace": draw.choice([0, 1, 2, 3]),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
    }  # fmt: skip
    if family == "glm4_moe":
        heads = {name: draw.random() < 0.5 for name in ("use_qk_norm", "attention_bias", "norm_topk_prob")}
        return sizes | heads | {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    if family in ("dots1", "solar_open"):
        windows = {"layer_types": [draw.choice(factories.TYPES) for _ in range(3)]} if family == "dots1" else {}
        sizes |= {name: draw.random() < 0.5 for name in ("attention_bias", "norm_topk_prob")} | windows
        return sizes if windows else {name: size for name, size in sizes.items() if name != "first_k_dense_replace"}
    if family == "glm4_moe_lite":
        del sizes["first_k_dense_replace"]
        sizes["mlp_layer_types"] = [draw.choice(["dense", "sparse"]) for _ in range(3)]
    if family in factories.INDEXED:
        sizes |= {"norm_topk_prob": draw.random() < 0.5, "index_topk": draw.choice([4, 100])}
        kinds = ["full", *(draw.choice(["full", "shared"]) for _ in range(2))]
        return sizes | ({"indexer_types": kinds} if family == "glm_moe_dsa" else {})
    sizes["q_lora_rank"] = draw.choice([None, 10])
    if family == "deepseek_v2":
        return sizes | {"topk_method": draw.choice(["greedy", "group_limited_greedy"])}
    sizes["norm_topk_prob"] = draw.random() < 0.5
    return sizes if family in factories.HYBRIDS else sizes | {"rope_interleave": draw.random() < 0.5}


def loaded(source: Path) -> tuple[Any, LaminaForCausalLM]:
    """The source's model, and ours with its tensors."""
    opened, standard = open_dense(str(source))
    model = LaminaForCausalLM(LaminaConfig(**checkpoint_config(standard, standard["forms"], "float32"))).eval()
    tensors = opened.read(opened.tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == geometry_of(standard).expected_tensors()
    tied = {"lm_head.weight"} if standard["tie_word_embeddings"] else set()
    assert set(model.load_state_dict(tensors, strict=False).missing_keys) == tied
    model.tie_weights()
    theirs = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")  # the others need even widths
    return theirs.eval(), model


def compare(source: Path) -> None:
    theirs, ours = loaded(source)
    ids_BT = torch.randint(0, theirs.config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_BTV, logits_BTV = theirs(ids_BT).logits, ours(ids_BT).logits
        their_decoded_BTV, decoded_BTV = (decoded(model, ids_BT) for model in (theirs, ours))
        their_rest_BTV, rest_BTV = (continued(model, ids_BT) for model in (theirs, ours))
    limit = LIMIT * float(expected_BTV.abs().max())
    assert float((logits_BTV - expected_BTV).abs().max()) <= limit
    assert float((rest_BTV - their_rest_BTV).abs().max()) <= 2 * limit
    own = float((their_decoded_BTV - expected_BTV[:, 20:]).abs().max())  # of a state's rule for one token
    assert float((decoded_BTV - their_decoded_BTV).abs().max()) <= limit + own
    assert float((decoded_BTV - expected_BTV[:, 20:]).abs().max()) <= limit + own
    if "linear_attention" in ours.config.layer_types:
        padded = {"attention_mask": torch.ones_like(ids_BT).index_fill(1, torch.arange(4), 0)}
        with torch.no_grad():
            expected_BTV, logits_BTV = (model(ids_BT, **padded).logits[:, 4:] for model in (theirs, ours))
        assert float((logits_BTV - expected_BTV).abs().max()) <= 5 * limit


def continued(model: Any, ids_BT: Tensor) -> Tensor:
    """The logits of tokens 10 to 23 at once, behind a cache of the first 10."""
    cached = model(ids_BT[:, :10], use_cache=True).past_key_values
    logits_BTV: Tensor = model(ids_BT[:, 10:], past_key_values=cached).logits
    return logits_BTV


def decoded(model: Any, ids_BT: Tensor) -> Tensor:
    """The logits of tokens 20 to 23, one by one behind a cache of the first 20."""
    cached = model(ids_BT[:, :20], use_cache=True).past_key_values
    return torch.cat([model(ids_BT[:, t : t + 1], past_key_values=cached).logits for t in range(20, 24)], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 4 else []) for seed in range(20)]
)
@pytest.mark.parametrize("family", [name for name in factories.ALL_FAMILIES if name not in factories.FAMILIES])
@pytest.mark.sample(14)
def test_logits_of_random_mixtures(family: str, seed: int, tmp_path: Path) -> None:
    compare(factories.make_model(tmp_path, family, seed=seed, **random_sizes(family, seed)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-tiny-ts", "qwen3moe-tiny-ts", "deepseekv3-tiny-ts"])
def test_logits_of_trained_mixtures(name: str, shared_dir: Path) -> None:
    compare(shared_dir / "models" / name)


def make_router(experts: int = 8, top_k: int = 2, **changes: Any) -> Router:
    mixture = {**ROUTER, **changes, "layers": [{"experts": experts, "width": 4, "top_k": top_k}]}
    sizes = mixture_of(mixture, 0)
    assert sizes is not None
    return Router(mixture, 6, sizes)


def test_experts_are_chosen_from_the_best_groups_alone() -> None:
    router = make_router(score="sigmoid", groups=4, top_groups=1, group_score="top2")
    scores_TE = torch.tensor([[0.9, 0.05, 0.6, 0.5, 0.1, 0.2, 0.3, 0.4]])
    assert set(router.choose(scores_TE, None)[0].tolist()) == {2, 3}, "0.6 + 0.5 is more than 0.9 + 0.05"
    bias_E = torch.tensor([0.0, 0.5, 0, 0, 0, 0, 0, 0])
    assert set(router.choose(scores_TE, bias_E)[0].tolist()) == {0, 1}
    assert set(make_router(groups=4, top_groups=1).choose(scores_TE, None)[0].tolist()) == {0, 1}


def test_logits_whose_sigmoids_are_1_keep_their_order() -> None:
    router = make_router(score="sigmoid", renormalise=False)
    router.weight.data = torch.arange(20.0, 28.0)[:, None].repeat(1, 6)
    weight_Tk, chosen_Tk = router(torch.ones(3, 6))
    assert weight_Tk.eq(1).all()
    assert chosen_Tk.tolist() == [[7, 6]] * 3
    assert route(router.logits(torch.ones(1, 6)), RoutingRule("sigmoid", 2)).experts.tolist() == [[7, 6]]


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    router = make_router(score="sigmoid", renormalise=False, scale=2.5)
    router.initialise_(1.0)
    x_TD = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    bias_E = torch.full((8,), -9.0).index_fill(0, torch.tensor([3, 5]), 9.0)
    weight_Tk, chosen_Tk = router(x_TD, bias_E)
    assert set(chosen_Tk.flatten().tolist()) == {3, 5}
    torch.testing.assert_close(weight_Tk, 2.5 * (x_TD @ router.weight.T).sigmoid().gather(1, chosen_Tk))


def test_tokens_of_an_expert_come_in_order() -> None:
    chosen_Tk = torch.tensor([[4, 1], [1, 2], [4, 2]])
    by_expert = {expert: (token.tolist(), place.tolist()) for expert, token, place in passing(chosen_Tk)}
    assert by_expert == {1: ([0, 1], [1, 0]), 2: ([1, 2], [1, 1]), 4: ([0, 2], [0, 0])}
    assert [*by_expert] == sorted(by_expert)


def test_the_roles_of_a_layer_are_those_of_its_experts() -> None:
    mixture = standard_config(factories.make_config("qwen2_moe").to_dict())["mixture"]
    dense = {"input_norm": "n", "q": "a.q", "gate": "mlp.g", "up": "mlp.u", "down": "mlp.d"}
    assert layer_modules(dense, mixture, None) == dense
    paths = layer_modules(dense, mixture, mixture_of(mixture, 1))
    assert [*paths][:4] == ["input_norm", "q", "router", "experts.0.gate"]
    assert paths["experts.5.down"] == "mlp.experts.5.down_proj"
    assert paths["shared.up"] == "mlp.shared_expert.up_proj"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layers": [{"experts": 4, "width": 8, "top_k": 5}]}, "layer 0 chooses 5 of 4 experts"),
    ({"layers": [{"experts": 6, "width": 8, "top_k": 2}], "groups": 4}, "6 experts in 4 groups"),
    ({"layers": [{"experts": 4, "width": 8}]}, "needed are experts, width, top_k"),
    ({"layers": [{"experts": 4, "width": 0, "top_k": 2}]}, "width 0, which is not a whole number from 1"),
    ({"layers": [{"experts": 4, "width": 8, "top_k": 2, "shared_width": 4}]}, "no path"),
    ({"layers": []}, "not a list of 1 entries"),
    ({"score": "tanh"}, "mixture.score is 'tanh'"),
    ({"modules": {"up": "u"}}, "needed are gate, up, down"),
    ({"colour": 1}, "unknown colour"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_a_mixture_that_cannot_be_built_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    usual = {
        "router": "r", "experts": "e", "modules": {"gate": "g", "up": "u", "down": "d"},
        "layers": [{"experts": 4, "width": 8, "top_k": 2}],
    }  # fmt: skip
    check_mixture(usual, 1)
    with pytest.raises(ValueError, match=said):
        check_mixture({**usual, **changes}, 1)


@pytest.mark.parametrize(
    ("rank", "reason"), [(0, "keeps 0 of 6"), (7, "keeps 7 of 6"), (1, "chooses 2 of 1"), ("3", "keeps '3' of 6")]
)
def test_a_router_of_wrong_size_is_refused(rank: Any, reason: str) -> None:
    config = LaminaConfig(**standard_config(factories.make_config("mixtral").to_dict()))
    forms = [dict(forms) for forms in config.forms]
    forms[0]["router"] = {"form": "experts", "rank": rank}
    with pytest.raises(ValueError, match=f"layer 0, router: .*{reason}"):
        LaminaConfig(**{**config.to_dict(), "forms": forms})


def test_experts_that_are_gone_have_no_roles() -> None:
    config = LaminaConfig(**standard_config(factories.make_config("mixtral").to_dict()))
    forms = [{"router": {"form": "experts", "rank": 3}}, *config.forms[1:]]
    fewer = LaminaConfig(**{**config.to_dict(), "forms": forms})
    assert fewer.mlp_blocks(0) == ["experts.0", "experts.1", "experts.2"]
    assert fewer.mlp_blocks(1) == config.mlp_blocks(1)
    with pytest.raises(ValueError, match=r"experts\.4\.up: block.modules has no such role"):
        LaminaConfig(
            **{**config.to_dict(), "forms": [{**forms[0], "experts.4.up": {"form": "pruned", "rank": 2}}, *forms[1:]]}
        )
