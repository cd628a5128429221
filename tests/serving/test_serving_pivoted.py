"""The pivoted form, and factors over value heads in a basis of their own and over pruned channels."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig
from lamina.factored_lamina import PivotedLinears
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import compiled_is_eager, factored, same_as_prefill, same_logits
from tests.serving.serving_sources import SOURCES, describe, make_source, padded_batch

pytestmark = pytest.mark.sample(3)

KINDS = (kinds.pivoted, kinds.pivoted_in_bases, kinds.low_rank_in_bases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOURCES)
def test_full_rank_is_the_source(name: str, kind: Any) -> None:
    model, _ = factored(name, kind, 1.0)
    same_logits(model, make_source(name), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOURCES)
def test_lower_rank_is_the_products(name: str, kind: Any) -> None:
    model, reference = factored(name, kind, 0.5)
    same_logits(model, reference, 2e-5)
    ids_BT, _ = padded_batch()
    assert (make_source(name)(ids_BT).logits - reference(ids_BT).logits).abs().amax() > 0.01  # it is another model


@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied", "gptj", "mistral-window"])
@torch.no_grad()
def test_decoding_is_the_prefill(name: str) -> None:
    model, _ = factored(name, [*KINDS], 0.5)
    same_as_prefill(model, num_new=16)
    same_as_prefill(model, num_new=8, cache_implementation="static", disable_compile=True)


@pytest.mark.slow
def test_compiled_decoding_has_no_graph_breaks() -> None:
    assert compiled_is_eager(factored("llama-gqa", [*KINDS], 0.5)[0]) == 1


def test_shapes_are_the_contract() -> None:
    model, _ = factored("llama-gqa", [kinds.pivoted, kinds.pivoted_in_bases, kinds.low_rank_in_bases], 0.5)
    state = {name.removeprefix("model.layers."): t for name, t in model.state_dict().items()}
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert shapes["0.self_attn.query_key.pivoted.rows.weight"] == (24, 48)
    assert shapes["0.self_attn.query_key.pivoted.coefficients.weight"] == (72 + 36 - 24, 24)
    assert shapes["0.self_attn.query_key.pivoted.indices"] == (24,)
    assert state["0.self_attn.query_key.pivoted.indices"].dtype == torch.int32
    assert shapes["1.self_attn.v_proj.weight"] == (3 * 6, 48)
    assert shapes["1.self_attn.output.pivoted.rows.weight"] == (18, 6 * 6)
    assert shapes["1.mlp.gate_up.pivoted.coefficients.weight"] == (2 * 40 - 24, 24)
    assert shapes["1.mlp.down.pivoted.rows.weight"] == (20, 40)
    assert shapes["2.self_attn.o_proj.first.weight"] == (18, 36)
    assert shapes["2.mlp.down_proj.second.weight"] == (48, 20)
    assert not {"0.self_attn.q_proj.weight", "1.mlp.down_proj.weight", "2.mlp.down_proj.weight"} & {*shapes}
    assert model.to(torch.bfloat16).model.layers[0].self_attn.query_key.pivoted.indices.dtype == torch.int32


def test_products_are_those_of_the_stored_numbers() -> None:
    """A token costs as many products as the form stores: no linear runs twice, and none but the stored ones."""
    model, _ = factored("opt-tied", kinds.pivoted, 0.5)
    products = 0

    def count(module: nn.Linear, args: tuple[torch.Tensor], _: torch.Tensor) -> None:
        nonlocal products
        products += args[0].numel() // args[0].shape[-1] * module.weight.numel()

    layer = model.model.decoder.layers[0]
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.register_forward_hook(count)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
    assert products == 3 * sum(linear.weight.numel() for linear in linears)
    assert sum(p.numel() for p in layer.parameters() if p.ndim == 2) == sum(x.weight.numel() for x in linears)


def test_coefficients_are_of_the_rows() -> None:
    torch.manual_seed(0)
    for rank in (1, 3, 7):
        group = PivotedLinears(9, {"q": 5, "k": 2}, rank)
        group.indices.copy_(torch.randperm(7)[:rank].sort().values)
        group.eval().requires_grad_(False)
        x_BTD = torch.randn(2, 4, 9)
        weight_mI = torch.empty(7, 9)
        others = [output for output in range(7) if output not in group.indices.tolist()]
        weight_mI[group.indices] = group.rows.weight
        if group.coefficients is not None:
            weight_mI[others] = group.coefficients.weight @ group.rows.weight
        for out_BTC, rows_CI in zip(group(x_BTD).values(), weight_mI.split([5, 2]), strict=True):
            assert torch.allclose(out_BTC, x_BTD @ rows_CI.T, atol=1e-6)


def test_other_indices_are_seen() -> None:
    """Changed in place, loaded, or moved: what was made of the old ones is not used again."""
    torch.manual_seed(0)
    group, other = (PivotedLinears(4, {"o": 6}, 2) for _ in range(2))
    x_BTD = torch.randn(1, 1, 4)
    before = group(x_BTD)["o"]
    group.indices.copy_(torch.tensor([1, 4]))
    changed = group(x_BTD)["o"]
    assert torch.equal(changed[..., [1, 4]], before[..., [0, 1]])
    assert torch.equal(changed[..., [0, 2, 3, 5]], before[..., 2:])
    other.load_state_dict(group.state_dict())
    assert torch.equal(other(x_BTD)["o"], changed)


def test_fixed_positions_change_no_output() -> None:
    """The positions that an engine computes once give the same outputs, also after it has loaded other indices."""
    torch.manual_seed(0)
    group, fixed = (PivotedLinears(4, {"q": 4, "k": 2}, 2) for _ in range(2))
    x_ND = torch.randn(3, 4)
    for indices in ([1, 4], [0, 5]):
        group.indices.copy_(torch.tensor(indices))
        fixed.load_state_dict(group.state_dict())
        fixed.fix_positions()
        for role, out_NC in group(x_ND).items():
            assert torch.equal(fixed(x_ND)[role], out_NC)
    assert [*fixed.state_dict()] == [*group.state_dict()]


def test_gradients_reach_both_factors() -> None:
    torch.manual_seed(0)
    group = PivotedLinears(4, {"o": 6}, 2)
    group(torch.randn(2, 3, 4))["o"].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in group.parameters())


@pytest.mark.parametrize("indices", [[1, 1], [4, 1], [1, 6], [-1, 3]])
def test_damaged_indices_are_refused(indices: list[int]) -> None:
    group = PivotedLinears(4, {"o": 6}, 2)
    group.indices.copy_(torch.tensor(indices))
    with pytest.raises(ValueError, match="indices of pivoted o are not 2 ascending positions below 6"):
        group(torch.randn(1, 1, 4))


def test_random_initialisation_can_run() -> None:
    sizes = kinds.sizes_of(make_source("llama-gqa").config)
    config = LaminaConfig(**describe(make_source("llama-gqa").config, [kinds.pivoted(sizes, 0.5)] * 3))
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    assert model.model.layers[0].mlp.down.pivoted.indices.tolist() == [*range(24)]
    assert torch.isfinite(model(torch.tensor([[5, 6]])).logits).all()


PIVOTED = {"form": "pivoted", "rank": 4, "group": "output"}
DOWN = {**PIVOTED, "group": "down", "width": 9}
NARROW = {"form": "head_pca", "rank": 5}
BAD_FORMS = [
    ({"o": {**PIVOTED, "rank": 49}}, r"layer 1, o: pivoted rank 49, allowed is 1 to min\(in, out of all\) 48"),
    ({"o": {**PIVOTED, "group": "query_key"}}, "layer 1, o: .*group 'query_key', allowed is .'output'"),
    ({"v": {**PIVOTED, "group": "output"}}, "layer 1, v: pivoted is for q, k, o, o_proj, gate, up, down"),
    ({"q": {**PIVOTED, "group": "query_key"}}, "layer 1, q: .* needs the same on k, which has none"),
    ({"o": {**PIVOTED, "width": 3}}, "layer 1, o: pivoted has width for gate, up, down only"),
    ({"o": {**PIVOTED, "value_rank": 13}}, "layer 1, o: pivoted value_rank 13, allowed is 1 to 12"),
    ({"o": {**PIVOTED, "value_rank": 6}, "v": NARROW}, r"layer 1: different value heads of v 5 \(head_pca\), o 6"),
    ({"o": PIVOTED, "v": NARROW}, r"layer 1: different value heads of v 5 \(head_pca\), o 12 \(pivoted\)"),
    ({"down": DOWN}, r"layer 1: different channels: gate 80 \(dense\), up 80 \(dense\), down 9 \(pivoted\)"),
    ({"down": {**DOWN, "rank": 10}}, r"layer 1, down: pivoted rank 10, .* 9"),
]


@pytest.mark.parametrize(("layer", "message"), BAD_FORMS)
def test_forms_that_do_not_fit(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**describe(make_source("llama-gqa").config, [{}, layer, {}]))
