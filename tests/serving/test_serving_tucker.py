"""Tucker groups: dense and sparse cores, what is made of them, and what becomes of that when the parameters change."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.factored_lamina import stored_state
from lamina.tucker_lamina import SparseCore, TuckerLinears, first_bits
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored, factorise, forms_of, same_as_prefill, same_logits, sparse_core
from tests.serving.serving_sources import build, describe, make_source, padded_batch

SOURCES = ("llama-gqa", "llama-mha", "llama-mqa-tied", "qwen2-tied", "qwen3", "mistral-window", "opt-tied", "gptj")
KINDS = (kinds.tucker, kinds.tucker_sparse, kinds.tucker_own_output, kinds.tucker_sparse_own_output)
CASES = [(kind, name) for kind in KINDS for name in SOURCES]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SOURCES)
def test_full_rank_is_the_source(name: str) -> None:
    for kind in (kinds.tucker_sparse, kinds.tucker_own_output):
        model, _ = factored(name, kind, 1.0)
        same_logits(model, make_source(name), 1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_lower_rank_is_the_product(kind: Any, name: str) -> None:
    same_logits(*factored(name, kind, 0.5), relative=2e-5)


@pytest.mark.parametrize(("kind", "name"), [c for c in CASES if "sparse" in c[0].__name__ and c[1] in SOURCES[:4]])
@torch.no_grad()
def test_csr_is_dense(kind: Any, name: str) -> None:
    model, reference = factored(name, kind, 0.3, core_format="csr")
    same_logits(model, reference, 2e-5)
    ids_BT, _ = padded_batch()
    wide = model(ids_BT).logits
    half = model.to(torch.bfloat16)(ids_BT).logits  # CSR products are made in float32
    assert half.dtype == torch.bfloat16
    assert (half.float() - wide).norm() < 0.05 * wide.norm()


@torch.no_grad()
def test_csr_is_used_where_it_can_be() -> None:
    for kind, formats in ((kinds.tucker_sparse, {torch.sparse_csr}), (kinds.tucker, {torch.strided})):
        model, _ = factored("llama-gqa", kind, 0.5, core_format="csr")
        model(padded_batch()[0])
        assert {layout for tucker in tuckers(model) for layout in layouts(tucker)} == formats
        with torch.enable_grad():
            model.train()(padded_batch()[0]).logits.sum().backward()
        assert all(p.grad is not None for tucker in tuckers(model) for p in tucker.parameters())
    same_as_prefill(factored("llama-gqa", kinds.tucker_sparse, 0.5, core_format="csr")[0].eval(), num_new=8)


def tuckers(model: Any) -> list[TuckerLinears]:
    return [module for module in model.modules() if isinstance(module, TuckerLinears)]


def layouts(tucker: TuckerLinears) -> set[torch.layout]:
    assert tucker._derived is not None
    return {matrix.layout for name, matrix in tucker._derived[1].items() if name not in ("first", "second")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied", "gptj"])
@torch.no_grad()
def test_decoding_is_the_prefill(name: str) -> None:
    same_as_prefill(factored(name, [kinds.tucker_sparse, kinds.tucker_own_output, kinds.dense], 0.5)[0])


def test_names_and_shapes() -> None:
    def below(name: str, kind: Any, prefix: str) -> dict[str, Any]:
        source = make_source(name).config
        with torch.device("meta"):
            model: Any = LaminaForCausalLM(LaminaConfig(**describe(source, forms_of(source, kind, 0.5))))
        tensors = {k: t for k, t in stored_state(model).items() if ".tucker." in k and k.startswith(prefix)}
        return {k.removeprefix(prefix): (tuple(t.shape), t.dtype) for k, t in tensors.items()}

    floats, bytes_ = torch.float32, torch.uint8
    attention = below("llama-gqa", kinds.tucker_sparse, "model.layers.0.self_attn.tucker.")
    assert attention == {
        "first": ((48, 24), floats),
        "second": ((12, 12), floats),
        "third_qo": ((2, 2), floats),
        "third_kv": ((2, 2), floats),
        "core_qo.values": ((24 * 12 * 12 // 2,), floats),
        "core_qo.mask": ((24 * 12 * 12 // 8,), bytes_),
        "core_kv.values": ((24 * 12 * 6 // 2,), floats),
        "core_kv.mask": ((24 * 12 * 6 // 8,), bytes_),
    }
    own = below("llama-gqa", kinds.tucker_own_output, "model.layers.0.self_attn.tucker.")
    assert {k: shape for k, (shape, _) in own.items()} == {
        "first": (48, 24), "second": (12, 6), "third_q": (1, 1), "core_q": (24, 6, 1, 6), "third_kv": (2, 2),
        "core_kv": (24, 6, 2, 3), "first_o": (48, 24), "second_o": (12, 6), "core_o": (24, 6, 1, 6),
    }  # fmt: skip
    one = below("gptj", kinds.tucker, "transformer.h.0.attn.tucker.")
    assert {k: shape for k, (shape, _) in one.items()} == {
        "first": (48, 24), "second": (8, 4), "third": (4, 2), "core": (24, 4, 2, 6),
    }  # fmt: skip
    mlp = below("llama-gqa", kinds.tucker, "model.layers.0.mlp.tucker.")
    assert {k: shape for k, (shape, _) in mlp.items()} == {
        "first": (48, 24), "second": (80, 40), "third": (3, 2), "core": (24, 40, 2, 1),
    }  # fmt: skip
    assert "first" in below("opt-tied", kinds.tucker, "model.decoder.layers.0.mlp_factors.tucker.")


def test_bitmap() -> None:
    core, values, mask = sparse_core(torch.randn(3, 5, 2, 3), 17)
    module = SparseCore((3, 5, 2, 3), 17)
    assert module.mask.shape == (12,)  # 90 bits
    module.load_state_dict({"values": values, "mask": mask})
    assert torch.equal(module(), core)
    by_hand = torch.zeros(90)
    positions = [i for i in range(90) if mask[i // 8] >> i % 8 & 1]
    by_hand[positions] = values
    assert torch.equal(core.flatten(), by_hand)
    assert module.half().mask.dtype == torch.uint8
    assert first_bits(11, 10).tolist() == [255, 3]
    module.mask[0] ^= 1
    with pytest.raises(ValueError, match=r"bitmap has 1[68] bits, config\.json says 17"):
        module()


@torch.no_grad()
def test_made_once_and_anew_when_parameters_change() -> None:
    model, reference = factored("llama-gqa", kinds.tucker_sparse, 0.5)
    ids_BT, _ = padded_batch()
    before = model(ids_BT).logits
    tucker = tuckers(model)[0]
    made = tucker._derived
    assert torch.equal(model(ids_BT).logits, before)
    assert tucker._derived is made

    with torch.inference_mode():
        assert torch.equal(model(ids_BT).logits, before)
    assert tucker._derived is made

    clone = copy.deepcopy(model)
    tuckers(clone)[0].core_qo.values.mul_(2)  # in place, as an optimizer does
    changed = clone(ids_BT).logits
    assert (changed - before).abs().amax() > 1e-3
    assert torch.equal(model(ids_BT).logits, before)
    tensors = {name: t.clone() for name, t in clone.state_dict().items()}
    model.load_state_dict(tensors, assign=True)
    assert torch.equal(model(ids_BT).logits, changed)
    model.lm_head.half(), model.model.embed_tokens.half(), model.model.norm.half(), model.model.layers.half()
    half = model(ids_BT).logits.float()
    assert 0 < (half - changed).abs().amax() < 0.2
    assert {t.dtype for one in tuckers(model) for t in (one._derived or [0, {}])[1].values()} == {torch.float16}
    assert {t.dtype for name, t in model.state_dict().items() if name.endswith(".mask")} == {torch.uint8}
    back = model.to(torch.float32)(ids_BT).logits  # of the rounded parameters
    assert 0 < (back - changed).abs().amax() < 0.2
    fresh = build(reference.config, dict(model.state_dict()), model.config.forms)
    assert torch.equal(back, fresh(ids_BT).logits)
    first = tuckers(model)[0].first
    first.weight = torch.nn.Parameter(torch.zeros_like(first.weight))
    assert (model(ids_BT).logits - back).abs().amax() > 1e-3


def test_made_in_inference_mode_serves_a_gradient() -> None:
    model, _ = factored("llama-gqa", kinds.tucker_sparse, 0.5)
    model.requires_grad_(False)
    ids_BT, _ = padded_batch()
    with torch.inference_mode():
        before = model(ids_BT).logits.clone()
    embedded = model.get_input_embeddings()(ids_BT).requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    assert torch.equal(logits, before)
    logits.sum().backward()
    assert embedded.grad.abs().amax() > 0


def test_training_makes_it_in_each_call() -> None:
    model, _ = factored("llama-gqa", kinds.tucker_sparse_own_output, 0.5)
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        before = model(ids_BT, labels=ids_BT).loss
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
    assert all(tucker._derived is None for tucker in tuckers(model))
    with torch.no_grad():
        assert model.eval()(ids_BT, labels=ids_BT).loss < before


GOOD: dict[str, Any] = {"form": "tucker", "ranks": [20, 12, 4], "sparse": True, "nnz_qo": 100, "nnz_kv": 50}
OWN = {"form": "tucker", "ranks": [20, 12, 3], "own_output": True, "ranks_o": [48, 12]}
BAD = [
    ("qkv", GOOD, "layer 0, q: .* needs the same on o, which has none"),
    ("qkvo", {**GOOD, "ranks": [49, 12, 4]}, r"ranks \[49, 12, 4\], allowed is 1 to \[48, 12, 4\]"),
    ("qkvo", {**GOOD, "ranks": [20, 12]}, r"ranks \[20, 12\], expected 3 numbers"),
    ("qkvo", {**GOOD, "ranks": [20, 12, 0]}, r"ranks \[20, 12, 0\], allowed"),
    ("qkvo", {**GOOD, "ranks": 3}, "ranks 3, expected 3 numbers"),
    ("qkvo", {**GOOD, "nnz_qo": 20 * 12 * 2 * 6 + 1}, r"nnz_qo 2881, allowed is 1 to 2880 of \(20, 12, 2, 6\)"),
    ("qkvo", {**GOOD, "nnz": 3}, "with sparse True needs nnz_kv, nnz_qo"),
    ("qkvo", {**GOOD, "sparse": False}, "with sparse False needs no nnz"),
    ("qkvo", {**GOOD, "sparse": "yes"}, "sparse 'yes', allowed are true and false"),
    ("qkvo", {**GOOD, "own_output": True}, "needs both own_output and ranks_o"),
    ("qkvo", {**OWN, "ranks": [20, 12, 4]}, r"ranks \[20, 12, 4\], allowed is 1 to \[48, 12, 3\]"),
    ("qkvo", {**OWN, "ranks_o": [49, 12]}, r"ranks_o \[49, 12\], allowed is 1 to \[48, 12\]"),
    ("qkvo", {**GOOD, "core": 1}, "tucker has no core"),
    (("gate", "up", "down"), OWN, "layer 0, gate: .*in attention only"),
    (("gate", "up", "down"), {"form": "tucker", "ranks": [48, 81, 3]}, r"allowed is 1 to \[48, 80, 3\]"),
    (("gate", "up"), {"form": "tucker", "ranks": [48, 80, 3]}, "needs the same on down, which has none"),
]


@pytest.mark.parametrize(("roles", "spec", "message"), BAD)
def test_forms_that_do_not_fit(roles: Any, spec: dict[str, Any], message: str) -> None:
    fields = describe(make_source("llama-gqa").config, [dict.fromkeys(roles, spec), {}, {}])
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**fields)


def test_core_format_is_checked() -> None:
    fields = describe(make_source("llama-gqa").config)
    with pytest.raises(ValueError, match="core_format is 'coo'"):
        LaminaConfig(**fields, core_format="coo")


def test_random_initialisation() -> None:
    source = make_source("llama-gqa").config
    layers = [kinds.tucker_sparse, kinds.tucker_sparse_own_output, kinds.latent_keys_absorbed_values]
    torch.manual_seed(0)
    model: Any = LaminaForCausalLM(LaminaConfig(**describe(source, forms_of(source, layers, 0.5))))
    for name, parameter in model.named_parameters():
        assert parameter.abs().amax() <= 4.0, name  # false for NaN, too
        assert parameter.abs().amax() > 0 or name.endswith("bias"), name
    for core in (module for module in model.modules() if isinstance(module, SparseCore)):
        assert int((core() != 0).sum()) == core.nnz
    for tucker in tuckers(model):  # the weights that the factors stand for are of the usual size
        width = tucker.first.in_features
        weight_DC = torch.cat([*tucker(torch.eye(width), "in").values()], -1)
        assert 0.002 < weight_DC.std() < 0.04


def test_an_offloaded_layer_keeps_nothing(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, _ = factored("llama-gqa", kinds.tucker_sparse, 0.5)
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        expected = model(ids_BT).logits
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb"), "cpu")
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    again: Any = LaminaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        for _ in range(2):
            assert (again(ids_BT).logits - expected).abs().amax() <= 2e-5
    kept = [[t._derived is not None for t in tuckers(layer)] for layer in again.model.layers]
    assert kept == [[True] * 2, [False] * 2, [True] * 2]


def test_a_damaged_bitmap_is_named(tmp_path: Path) -> None:
    model, _ = factored("llama-gqa", kinds.tucker_sparse, 0.5)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.tucker.core.mask"][0] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"bitmap has \d+ bits, config\.json says 960"):
        LaminaForCausalLM.from_pretrained(tmp_path)


def test_the_source_of_the_test_is_another_model() -> None:
    source = make_source("llama-gqa")
    forms = forms_of(source.config, kinds.tucker_sparse, 0.5)
    _, reference = factorise(source.config, source.state_dict(), forms)
    ids_BT, _ = padded_batch()
    before = source(ids_BT).logits
    source.load_state_dict(reference)
    assert (source(ids_BT).logits - before).abs().amax() > 0.01
