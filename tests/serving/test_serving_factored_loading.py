"""Checkpoints with every form of factors: loaded, saved and loaded again; by installed and by remote code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lamina.factored_lamina import stored_state
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factorise, forms_of
from tests.serving.serving_sources import describe, make_source
from tests.serving.test_serving_loading import load, load_without_the_package, save_checkpoint

# Every form once: low_rank; joint and latent; tucker. head_pca, pruned and head_low_rank are in test_serving_loading.
ROTARY = [kinds.low_rank, kinds.latent_keys_absorbed_values, kinds.tucker_sparse]
OTHERS = [kinds.joint, kinds.tucker_own_output, kinds.latent_both]
SAVED = {"llama-gqa": ROTARY, "qwen2-tied": ROTARY, "gptj": [kinds.joint_head, *OTHERS[1:]], "opt-tied": ROTARY}


def write_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """As the compress side writes it, with buffers that old versions of the library stored with each layer."""
    source = make_source(name)
    forms = forms_of(source.config, SAVED[name], 0.5)
    tensors, _ = factorise(source.config, source.state_dict(), forms)
    prefix = f"{describe(source.config)['block']['layers']}.1."
    attention = describe(source.config)["block"]["modules"]["q"].rpartition(".")[0]
    old = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9)}
    old["rotary_emb.inv_freq"] = torch.ones(4)
    buffers = {f"{prefix}{attention}.{key}": tensor for key, tensor in old.items()}
    save_checkpoint(folder, source.config, tensors, forms, dtype, buffers)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("factored")
    for name in SAVED:
        write_checkpoint(root / name, name)
    return root


def expected_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "expected.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAVED])
def test_loaded_and_saved_again(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """`load` asserts that nothing is missing or unexpected; old buffers are neither."""
    model = load(checkpoints / name)
    expected = expected_of(checkpoints / name)
    with torch.no_grad():
        assert torch.equal(model(expected["ids"], attention_mask=expected["mask"]).logits, expected["logits"])
    model.save_pretrained(tmp_path)
    before, after = (load_file(root / "model.safetensors") for root in (checkpoints / name, tmp_path))
    kept = {key for key in before if not key.endswith(("attn.bias", "masked_bias", "inv_freq"))}
    assert after.keys() == kept
    assert len(kept) == len(before) - 3
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in kept)
    again = load(tmp_path, core_format="csr")
    with torch.no_grad():
        logits = again(expected["ids"], attention_mask=expected["mask"]).logits
    assert (logits - expected["logits"])[expected["mask"].bool()].abs().amax() <= 2e-5


@pytest.mark.parametrize("core_format", ["dense", "csr"])
@pytest.mark.parametrize("name", [*SAVED])
def test_bfloat16(name: str, core_format: str, checkpoints: Path) -> None:
    model = load(checkpoints / name, dtype=torch.bfloat16, core_format=core_format)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {t.dtype for key, t in model.state_dict().items() if key.endswith("mask")} <= {torch.uint8}
    expected = expected_of(checkpoints / name)
    mask_BT = expected["mask"].bool()
    with torch.no_grad():
        logits = model(expected["ids"], attention_mask=expected["mask"]).logits
    error = (logits.float() - expected["logits"])[mask_BT]
    assert error.norm() < 0.05 * expected["logits"][mask_BT].norm()
    assert model.generate(expected["ids"], attention_mask=expected["mask"], max_new_tokens=3).shape == (3, 17)


def test_a_half_precision_checkpoint_keeps_its_bitmaps(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "half", "llama-gqa", torch.bfloat16)
    model = load(tmp_path / "half", dtype="auto")
    file = load_file(tmp_path / "half" / "model.safetensors")
    for key, tensor in stored_state(model).items():
        assert torch.equal(tensor, file[key].to(tensor.dtype)), key


def test_split_between_layers_with_one_on_disk(checkpoints: Path, tmp_path: Path) -> None:
    """Biases beside factors too: a module's tensors are there only while it runs itself."""
    pytest.importorskip("accelerate")
    for name in ("qwen2-tied", "opt-tied"):
        folder, prefix = checkpoints / name, "model" if name == "qwen2-tied" else "model.decoder"
        last = "norm" if name == "qwen2-tied" else "final_layer_norm"
        parts = [f"{prefix}.embed_tokens", f"{prefix}.{last}", "lm_head", f"{prefix}.layers.0", f"{prefix}.layers.2"]
        parts.append("model.rotary_emb" if name == "qwen2-tied" else f"{prefix}.embed_positions")
        device_map = dict.fromkeys(parts, "cpu") | {f"{prefix}.layers.1": "disk"}
        model = load(folder, device_map=device_map, offload_folder=tmp_path / name)
        layer = model.get_submodule(f"{prefix}.layers.1")
        assert layer.self_attn.k_proj.bias.is_meta
        expected = expected_of(folder)
        with torch.no_grad():
            assert torch.equal(model(expected["ids"], attention_mask=expected["mask"]).logits, expected["logits"])


@pytest.mark.nightly  # `test_serving_loading.py` has the like of the dense and pruned forms
@pytest.mark.slow
def test_code_in_the_checkpoint_is_enough(checkpoints: Path, tmp_path: Path) -> None:
    load_without_the_package(checkpoints, tmp_path)
