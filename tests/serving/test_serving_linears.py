"""Every stored factor is a linear, as libraries that adapt or quantise linears look for them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lamina.factored_lamina import HeadLowRankLinear, matrix_of, stored_state
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored, same_as_prefill
from tests.serving.serving_sources import make_source, padded_batch

pytestmark = pytest.mark.sample(3)

KINDS = (
    kinds.low_rank,
    kinds.joint,
    kinds.pivoted,
    kinds.pivoted_in_bases,
    kinds.low_rank_in_bases,
    kinds.latent_both,
    kinds.latent_keys_absorbed_values,
    kinds.narrow_keys_latent_values,
    kinds.tucker,
    kinds.tucker_own_output,
)
NAMES = [kind.__name__ for kind in KINDS]


def mixed(kind: Any) -> Any:
    """A model whose layers are of a kind, and per head in the last."""
    return factored("llama-gqa", [kind, kind, kinds.narrow_keys_latent_values], 0.5)[0]


def linears(model: Any) -> list[str]:
    return [name for name, module in model.model.layers.named_modules() if isinstance(module, nn.Linear)]


def logits(model: Any) -> torch.Tensor:
    ids_BT, mask_BT = padded_batch()
    with torch.no_grad():
        return model(ids_BT, attention_mask=mask_BT).logits[mask_BT.bool()]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_stored_matrix_is_the_weight_of_a_linear(kind: Any) -> None:
    """But for `third` of a Tucker group, which mixes up to four roles."""
    model = mixed(kind)
    weights = {id(m.weight) for m in model.model.layers.modules() if type(m) is nn.Linear}
    others = [
        name
        for name, parameter in model.model.layers.named_parameters()
        if parameter.ndim > 1 and id(parameter) not in weights and ".third" not in name
    ]
    assert others == []
    here = sum(parameter.numel() for parameter in model.parameters())
    assert here == sum(tensor.numel() for tensor in stored_state(model).values() if tensor.is_floating_point())


@pytest.mark.parametrize("name", ["llama-gqa", "gptj"])
def test_saving_writes_the_stored_names_and_numbers(name: str, tmp_path: Path) -> None:
    layers = [kinds.tucker, kinds.tucker_own_output, kinds.narrow_keys_latent_values]
    model, _ = factored(name, layers, 0.5)
    model.save_pretrained(tmp_path / "once")
    type(model).from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    stored = stored_state(model)
    attention = "transformer.h.1.attn" if name == "gptj" else "model.layers.1.self_attn"
    assert stored[f"{attention}.tucker.core_o"].ndim == 4
    for folder in ("once", "twice"):
        file = load_file(tmp_path / folder / "model.safetensors")
        assert {*file} == {*stored}
        assert all(torch.equal(tensor, file[key]) for key, tensor in stored.items())


def test_a_factor_of_another_shape_is_named() -> None:
    model = mixed(kinds.tucker)
    tensors = stored_state(model)
    tensors["model.layers.1.self_attn.tucker.first"] = tensors["model.layers.1.self_attn.tucker.first"].T
    with pytest.raises(RuntimeError, match=r"layers.1.self_attn.tucker.first: a tensor of shape \(24, 48\), not \(48"):
        model.load_state_dict(tensors)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_other_linears_in_their_place(kind: Any) -> None:
    """Modules that only compute, as engines and quantisers put there, whatever they hold inside."""

    class Opaque(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.held, self.bias_ = linear.weight.detach().clone(), linear.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.held, self.bias_)

    model = mixed(kind)
    expected = logits(model)
    for name in linears(model):
        parent, _, child = name.rpartition(".")
        linear = model.model.layers.get_submodule(name)
        setattr(model.model.layers.get_submodule(parent), child, Opaque(linear))
    assert linears(model) == []
    assert (logits(model) - expected).abs().amax() <= 2e-5
    same_as_prefill(model, num_new=6)


def test_vllm_loads_factors_as_they_are_stored() -> None:
    """It calls `load_weights` of a module that has one, with the stored names below it."""
    model, other = (
        factored("llama-gqa", [kinds.tucker_sparse, kinds.tucker, kinds.tucker], 0.5, seed=s)[0] for s in (0, 1)
    )
    for path in ("model.layers.0.self_attn.tucker", "model.layers.1.mlp.tucker"):
        stored, module = stored_state(model.get_submodule(path)), other.get_submodule(path)
        assert len([*module.load_weights(stored.items())]) == len(stored)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in stored_state(module).items())
        with pytest.raises(ValueError, match="the checkpoint has fourth, which is none of third"):
            [*module.load_weights([("fourth", torch.zeros(1))])]
    per_head = HeadLowRankLinear(8, 12, 4, 2, bias=True)
    with pytest.raises(ValueError, match=r"bias: a tensor of shape \(3,\), not \(12,\)"):
        [*per_head.load_weights([("bias", torch.zeros(3))])]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_peft_finds_and_merges_all(kind: Any) -> None:
    peft = pytest.importorskip("peft")
    model = mixed(kind)
    before, names = logits(model), linears(model)
    config = peft.LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    base = adapted.base_model.model
    wrapped = {n for n, m in base.model.layers.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert wrapped == {*names}
    with_adapter = logits(adapted)
    assert (with_adapter - before).abs().amax() > 1e-3
    with adapted.disable_adapter():
        assert (logits(adapted) - before).abs().amax() <= 2e-5
    ids_BT, _ = padded_batch()
    adapted.train()(ids_BT, labels=ids_BT).loss.backward()
    used = {n: p.grad.abs().amax() > 0 for n, p in adapted.named_parameters() if ".layers." in n and "lora_" in n}
    assert all(used.values()), [name for name, has in used.items() if not has]
    merged = adapted.eval().merge_and_unload()
    assert (logits(merged) - with_adapter).abs().amax() <= 1e-4 * with_adapter.abs().amax()
    assert {*linears(merged)} == {*names}


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_quanto_quantises_all(kind: Any) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = mixed(kind)
    before, names = logits(model), linears(model)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    found = {n for n, m in model.model.layers.named_modules() if isinstance(m, quanto.nn.QLinear)}
    assert found == {*names}
    after = logits(model)
    assert 0 < (after - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_hqq_quantises_all(kind: Any) -> None:
    core = pytest.importorskip("hqq.core.quantize")
    model = mixed(kind)
    before = logits(model)
    for name in linears(model):
        parent, _, child = name.rpartition(".")
        linear = copy.deepcopy(model.model.layers.get_submodule(name))
        config = core.BaseQuantizeConfig(nbits=8, group_size=None, axis=1)
        few = core.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
        setattr(model.model.layers.get_submodule(parent), child, few)
    after = logits(model)
    assert 0 < (after - before).norm() < 0.05 * before.norm()


def test_the_matrix_of_a_linear() -> None:
    linear, like = nn.Linear(3, 5, bias=False), torch.ones(1)
    assert matrix_of(linear, 3, like) is linear.weight
    assert torch.equal(matrix_of(nn.Sequential(linear), 3, like), linear.weight)
    assert make_source("llama-gqa").config.hidden_size == 48  # what the shapes above count on
