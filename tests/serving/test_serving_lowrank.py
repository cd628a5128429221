"""low_rank and the joint forms; what holds for every form of factors is tested here, too."""

from typing import Any

import pytest
import torch

from lamina import LaminaConfig
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored, same_as_prefill, same_logits, sizes_of
from tests.serving.serving_sources import describe, make_source, padded_batch

pytestmark = pytest.mark.sample(3)

SOURCES = ("llama-gqa", "qwen2-tied", "qwen3", "mistral-window", "opt-tied", "gptj")
ONE_GROUP = ("llama-mha", "opt-tied", "gptj")
CASES = [(kind, name) for kind in (kinds.low_rank, kinds.joint) for name in SOURCES]
CASES += [(kinds.joint_head, name) for name in ONE_GROUP]
MIXED = [kinds.low_rank, kinds.joint, kinds.tucker_sparse]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_full_rank_is_the_source(kind: Any, name: str) -> None:
    model, _ = factored(name, kind, 1.0)
    same_logits(model, make_source(name), 1e-5)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_lower_rank_is_the_products(kind: Any, name: str) -> None:
    model, reference = factored(name, kind, 0.5)
    same_logits(model, reference, 2e-5)
    ids_BT, _ = padded_batch()
    assert (make_source(name)(ids_BT).logits - reference(ids_BT).logits).abs().amax() > 0.01  # it is another model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied", "mistral-window"])
@torch.no_grad()
def test_decoding_is_the_prefill(name: str) -> None:
    same_as_prefill(factored(name, MIXED, 0.5)[0])
    same_as_prefill(factored("gptj", [kinds.joint_head, *MIXED[1:]], 0.5)[0], num_new=8)


def test_a_shared_factor_runs_once_and_each_role_once() -> None:
    model, _ = factored("llama-mha", [kinds.joint, kinds.joint_head, kinds.tucker], 0.5)
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith((".first", "_proj", ".tucker")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name.removeprefix("model.layers.")))
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        model(ids_BT)
    attention = {f"{i}.self_attn.{role}_proj" for i in range(3) for role in "qkvo"}
    mlp = {f"{i}.mlp.{role}_proj" for i in range(3) for role in ("gate", "up", "down")}
    shared = {"0.self_attn.q_proj.first", "0.mlp.gate_proj.first", "1.self_attn.q_proj.first"}
    shared |= {"2.self_attn.tucker.first", "2.mlp.tucker.first"}
    twice = ["2.self_attn.tucker", "2.mlp.tucker"]  # reads the hidden states, and writes to them
    assert sorted(calls) == sorted([*attention, *mlp, *shared, *twice, *twice])


def test_shapes_are_the_contract() -> None:
    model, _ = factored("llama-gqa", [kinds.low_rank, kinds.joint, kinds.dense], 0.5)
    shapes = {name.removeprefix("model.layers."): tuple(t.shape) for name, t in model.state_dict().items()}
    assert shapes["0.self_attn.o_proj.first.weight"] == (24, 72)
    assert shapes["0.self_attn.o_proj.second.weight"] == (48, 24)
    assert shapes["1.self_attn.q_proj.first.weight"] == (24, 48)
    assert shapes["1.self_attn.k_proj.second.weight"] == (36, 24)
    assert "1.self_attn.k_proj.first.weight" not in shapes
    assert shapes["1.mlp.up_proj.second.weight"] == (80, 24)
    assert model.config.base_model_tp_plan is None


def test_gradients_reach_every_factor() -> None:
    model, _ = factored("qwen2-tied", [kinds.joint, kinds.latent_keys_absorbed_values, kinds.tucker_sparse], 0.5)
    ids_BT, mask_BT = padded_batch()
    for _ in range(2):
        model.train()(ids_BT, attention_mask=mask_BT, labels=ids_BT, use_cache=False).loss.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().amax() > 0}
    assert without == set()


LOW = {"form": "low_rank", "rank": 4}
PAIR = {"form": "joint_low_rank", "rank": 4, "group": "query_key"}
HEADS = {"form": "joint_head_low_rank", "rank": 4, "group": "query_key"}
LATENT = {"form": "latent", "rank": 4}
ABSORBED = {"form": "latent", "rank": 4, "absorbed": True}
O = {"form": "absorbed", "rank": 4}  # noqa: E741
BAD_FORMS = [
    ({"k": {**LOW, "rank": 37}}, "layer 1, k: low_rank rank 37, allowed is 1 to min\\(in, out\\) 36"),
    ({"k": {**LOW, "rank": True}}, "layer 1, k: low_rank rank True"),
    ({"q": PAIR}, "layer 1, q: .* needs the same on k, which has none"),
    ({"q": PAIR, "k": {**PAIR, "rank": 5}}, "layer 1, q: .* needs the same on k, which has .*5"),
    ({r: {**PAIR, "rank": 49} for r in ("q", "k")}, "layer 1, q: .* 1 to min\\(in, out of both\\) 48"),
    ({r: {**PAIR, "group": "gate_up"} for r in ("q", "k")}, "layer 1, q: .*group 'gate_up', allowed is .'query_key'"),
    ({"v": PAIR}, "layer 1, v: joint_low_rank is for q, k, gate, up"),
    ({r: HEADS for r in ("q", "k")}, "layer 1, q: .*as many query as key heads, not 6 and 3"),
    ({"q": LATENT}, "layer 1, q: latent is for k, v"),
    ({"k": {**LATENT, "rank": 37}}, "layer 1, k: latent rank 37"),
    ({"k": ABSORBED, "o": O}, "layer 1, k: latent absorbed True"),
    ({"v": {**LATENT, "absorbed": 1}}, "layer 1, v: latent absorbed 1"),
    ({"v": ABSORBED}, "layer 1, v: .* needs .*'absorbed', 'rank': 4.* on o, which has none"),
    ({"v": LATENT, "o": O}, "layer 1, o: .* needs .*'absorbed': True.* on v"),
    ({"v": ABSORBED, "o": {**O, "rank": 5}}, "layer 1, v: .* on o, which has .*5"),
    ({"k": {**LATENT, "width": 3}}, "layer 1, k: latent has no width"),
]


@pytest.mark.parametrize(("layer", "message"), BAD_FORMS)
def test_forms_that_do_not_fit(layer: dict[str, Any], message: str) -> None:
    fields = describe(make_source("llama-gqa").config, [{}, layer, {}])
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**fields)


def test_a_pair_needs_both_roles() -> None:
    up = {"form": "joint_low_rank", "rank": 4, "group": "gate_up"}
    with pytest.raises(ValueError, match=r"layer 0, up: .* needs the same on gate, which has none"):
        LaminaConfig(**describe(make_source("opt-tied").config, [{"up": up}, {}, {}]))


def test_numbers_in_the_cache() -> None:
    source = make_source("llama-gqa").config
    sizes = sizes_of(source)

    def numbers(kind: Any, share: float = 0.5) -> int:
        layers = kinds.forms_of(source, [kind, kinds.dense, kinds.dense], share)
        config = LaminaConfig(**describe(source, layers))
        assert config.cache_numbers(1) == 2 * 36
        return config.cache_numbers(0)

    assert (sizes.kv_heads, sizes.head_dim) == (3, 12)
    assert numbers(kinds.low_rank) == numbers(kinds.joint) == numbers(kinds.tucker) == 72
    assert numbers(kinds.latent_keys) == numbers(kinds.latent_values) == 18 + 36
    assert numbers(kinds.latent_keys_absorbed_values) == 15 + 18
    assert numbers(kinds.latent_keys_narrow_values) == 18 + 3 * 6
