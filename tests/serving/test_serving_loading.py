"""From a folder, as a user loads it: with the code in the checkpoint, with the installed package, in half precision."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, StaticCache
from transformers.dynamic_module_utils import get_relative_import_files

import lamina
from lamina import MODELLING_FILES, LaminaForCausalLM, LaminaModel, modelling_source
from lamina.block_lamina import BLOCK_DEFAULTS
from lamina.factored_lamina import stored_state
from tests.serving import serving_factors as kinds
from tests.serving.serving_compressed import MIXED, compress, forms_for
from tests.serving.serving_factors import factorise, forms_of
from tests.serving.serving_sources import SOURCES, build, describe, make_source, padded_batch

SAVED = ("llama-gqa", "qwen2-tied", "opt-tied", "gptj")
# Every form of factors once: low_rank; joint and latent; tucker. head_pca, pruned and head_low_rank are in MIXED.
ROTARY = [kinds.low_rank, kinds.latent_keys_absorbed_values, kinds.tucker_sparse]
OTHERS = [kinds.joint, kinds.tucker_own_output, kinds.latent_both]
FACTORED = {"llama-gqa": ROTARY, "qwen2-tied": ROTARY, "gptj": [kinds.joint_head, *OTHERS[1:]], "opt-tied": ROTARY}


def copy_modelling_files(folder: Path) -> None:
    for name in MODELLING_FILES:
        (folder / name).write_bytes(modelling_source(name))


def test_the_modelling_files_are_what_transformers_copies() -> None:
    """From either file that `auto_map` names, by the function with which transformers finds what to copy."""
    package = Path(lamina.__file__).parent
    modelling, whole = package / "modeling_lamina.py", package / "wrapper_lamina.py"
    needed = {Path(path) for path in get_relative_import_files(modelling)}
    assert {path.name for path in (modelling, whole, *needed)} == {*MODELLING_FILES}
    assert {*map(Path, get_relative_import_files(whole))} == {modelling, *needed}
    assert needed >= {Path(path) for path in get_relative_import_files(package / "configuration_lamina.py")}


def write_mixed(folder: Path, name: str) -> None:
    """Write the mixed forms of a source."""
    source = make_source(name)
    forms = forms_for(source.config, MIXED)
    save_checkpoint(folder, source.config, compress(source.config, source.state_dict(), forms)[0], forms)


def write_factored(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """As the compress side writes it, with buffers that old versions of the library stored with each layer."""
    source = make_source(name)
    forms = forms_of(source.config, FACTORED[name], 0.5)
    tensors, _ = factorise(source.config, source.state_dict(), forms)
    prefix = f"{describe(source.config)['block']['layers']}.1."
    attention = describe(source.config)["block"]["modules"]["q"].rpartition(".")[0]
    old = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9)}
    old["rotary_emb.inv_freq"] = torch.ones(4)
    buffers = {f"{prefix}{attention}.{key}": tensor for key, tensor in old.items()}
    save_checkpoint(folder, source.config, tensors, forms, dtype, buffers)


def save_checkpoint(
    folder: Path,
    source: PreTrainedConfig,
    tensors: dict[str, Tensor],
    forms: list[dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Save a folder as the compress side writes it, with the logits that it must give in `expected.safetensors`.

    `others`: tensors that are saved, too.
    """
    folder.mkdir(parents=True)
    ids_BT, mask_BT = padded_batch()
    with torch.no_grad():
        logits = build(source, tensors, forms)(ids_BT, attention_mask=mask_BT).logits
    saved = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()} | {**others}
    if source.tie_word_embeddings:
        del saved["lm_head.weight"]
    save_file({k: t.contiguous() for k, t in saved.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe(source, forms)))
    copy_modelling_files(folder)
    save_file({"ids": ids_BT, "mask": mask_BT, "logits": logits}, folder / "expected.safetensors")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in SAVED:
        write_mixed(root / name, name)
    return root


@pytest.fixture(scope="module")
def factored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("factored")
    for name in FACTORED:
        write_factored(root / name, name)
    return root


def expected_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "expected.safetensors")


def load(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loaded with the installed package: no trust_remote_code, and nobody is asked."""
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    if auto is AutoModel:  # a causal model's file has a head besides, unless it is tied
        report["unexpected_keys"] = {key for key in report["unexpected_keys"] if not key.startswith("lm_head.")}
    assert not any(report.values()), report
    assert type(model).__module__ == "lamina.modeling_lamina"
    return model.eval()


@pytest.mark.parametrize("name", SAVED)
def test_installed_package_loads_without_remote_code(name: str, checkpoints: Path) -> None:
    model = load(checkpoints / name)
    expected = expected_of(checkpoints / name)
    with torch.no_grad():
        logits = model(expected["ids"], attention_mask=expected["mask"]).logits
        assert torch.equal(logits, expected["logits"])
        base = load(checkpoints / name, AutoModel)
        hidden_BTD = base(expected["ids"], attention_mask=expected["mask"]).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(hidden_BTD), expected["logits"])


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize(
    ("kind", "core_format"), [("checkpoints", "dense"), ("factored", "dense"), ("factored", "csr")]
)
def test_bfloat16(name: str, kind: str, core_format: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind) / name
    model = load(folder, dtype=torch.bfloat16, core_format=core_format)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {t.dtype for key, t in model.state_dict().items() if key.endswith("mask")} <= {torch.uint8}
    if model.base_model.rotary_emb is not None:
        assert model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    expected = expected_of(folder)
    mask_BT = expected["mask"].bool()
    with torch.no_grad():
        logits = model(expected["ids"], attention_mask=expected["mask"]).logits
    error = (logits.float() - expected["logits"])[mask_BT]
    assert error.norm() < 0.05 * expected["logits"][mask_BT].norm()
    assert model.generate(expected["ids"], attention_mask=expected["mask"], max_new_tokens=3).shape == (3, 17)


def test_device_map_splits_between_layers(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = checkpoints / "llama-gqa"
    device_map = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "lm_head"), "cpu")
    device_map |= {"model.rotary_emb": "cpu"}
    del device_map["model.layers"]
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    model = load(folder, device_map=device_map, offload_folder=tmp_path)
    expected = expected_of(folder)
    assert model.model.layers[1].self_attn.q_proj.head_second.weight.is_meta  # the factors of layer 1 stay on disk
    with torch.no_grad():
        assert torch.equal(model(expected["ids"], attention_mask=expected["mask"]).logits, expected["logits"])
    assert load(folder, device_map="cpu").device.type == "cpu"
    assert "LaminaDecoderLayer" in model._no_split_modules


def test_random_initialisation_fills_every_parameter(checkpoints: Path) -> None:
    torch.manual_seed(0)
    for name in SAVED:
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(AutoConfig.from_pretrained(checkpoints / name))
        for parameter, tensor in model.named_parameters():
            assert tensor.abs().amax() <= 1.0, parameter  # false for NaN, too
        factors = [t for parameter, t in model.named_parameters() if parameter.endswith(".head_second.weight")]
        assert len(factors) == 2
        assert all(0.01 < t.std() < 0.04 for t in factors)


@pytest.mark.parametrize("name", SOURCES)
def test_engines_that_build_on_the_base_model_skip_no_tensor(name: str) -> None:
    """vLLM makes the base model and skips, without a word, tensors that its patterns of unexpected keys match."""
    source = make_source(name)
    model = build(source.config, source.state_dict())
    patterns = [*model.base_model._keys_to_ignore_on_load_unexpected]
    patterns += LaminaModel(model.config)._keys_to_ignore_on_load_unexpected
    assert patterns
    tensors = {*model.state_dict(), "lm_head.weight"}
    assert not [(key, p) for key in tensors for p in patterns if re.search(p, key)]


def test_the_architecture_is_found_in_transformers(checkpoints: Path) -> None:
    """`transformers serve` and vLLM look `architectures[0]` up in transformers; vLLM expects a model's class there."""
    folder = checkpoints / "llama-gqa"
    named = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    assert issubclass(named, transformers.PreTrainedModel)
    assert named.is_backend_compatible()
    assert type(named.from_pretrained(folder)) is LaminaForCausalLM


def test_saved_again_it_is_the_same_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    for name in SAVED:
        load(checkpoints / name).save_pretrained(tmp_path / name)
        before, after = (load_file(root / name / "model.safetensors") for root in (checkpoints, tmp_path))
        assert before.keys() == after.keys()  # tied embeddings once
        assert all(torch.equal(before[key], after[key]) for key in before)
        for modelling_file in {*MODELLING_FILES} - {"wrapper_lamina.py"}:  # the decoder alone is saved
            assert (tmp_path / name / modelling_file).read_bytes() == modelling_source(modelling_file)
        mine, again = (json.loads((root / name / "config.json").read_text()) for root in (checkpoints, tmp_path))
        assert again["block"] == BLOCK_DEFAULTS | mine["block"]
        assert {key: again.get(key) for key in ("forms", "auto_map", "architectures")} == {
            key: mine[key] for key in ("forms", "auto_map", "architectures")
        }


REMOTE = """
import sys, torch, transformers
__import__("transformers.processing_utils")
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
root, again = Path(sys.argv[1]), Path(sys.argv[2])
sys.modules["lamina"] = None  # import lamina fails, installed or not
try:
    AutoModelForCausalLM.from_pretrained(root / "gptj", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("loaded code without consent")
for folder in sorted(root.iterdir()):
    def logits_of(path):
        expected = load_file(folder / "expected.safetensors")
        model, report = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, output_loading_info=True)
        assert not any(report.values()), report
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.no_grad():
            logits = model(expected["ids"], attention_mask=expected["mask"]).logits
        assert torch.equal(logits, expected["logits"]), folder
        tokens = model.generate(expected["ids"], attention_mask=expected["mask"], max_new_tokens=4, do_sample=False)
        assert tokens.shape[1] > expected["ids"].shape[1]
        transformers.logging.set_verbosity_error()  # of the base, transformers says that the head is left over
        base, report = AutoModel.from_pretrained(path, trust_remote_code=True, output_loading_info=True)
        report["unexpected_keys"] = {key for key in report["unexpected_keys"] if not key.startswith("lm_head.")}
        assert not any(report.values()), report
        transformers.logging.set_verbosity_warning()
        # Where `transformers serve` looks; processing_utils replaces the module that it imported at first.
        assert transformers is not sys.modules["transformers"]
        for module in (transformers, sys.modules["transformers"]):
            named = getattr(module, model.config.architectures[0])
        served = named.from_pretrained(path, trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(served(expected["ids"], attention_mask=expected["mask"]).logits, logits)
        return model
    logits_of(folder).save_pretrained(again / folder.name)
    logits_of(again / folder.name)
print("loaded", len(list(root.iterdir())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoints", pytest.param("factored", marks=pytest.mark.nightly)])
def test_code_in_the_checkpoint_is_enough(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """In a process that cannot import lamina. It prints no warning of weights or configurations."""
    checkpoints = request.getfixturevalue(kind)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", REMOTE, str(checkpoints), str(tmp_path / "again")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["loaded", str(len([*checkpoints.iterdir()]))]
    assert run.stderr == ""


def test_static_cache_of_a_loaded_model(checkpoints: Path) -> None:
    """generate(cache_implementation="static") and a cache of one's own give the same tokens."""
    model = load(checkpoints / "llama-gqa")
    expected = expected_of(checkpoints / "llama-gqa")
    options = {"attention_mask": expected["mask"], "max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    own = model.generate(expected["ids"], past_key_values=StaticCache(model.config, max_cache_len=19), **options)
    assert torch.equal(own, model.generate(expected["ids"], cache_implementation="static", **options))


# -- factors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORED)
def test_loaded_and_saved_again(name: str, factored: Path, tmp_path: Path) -> None:
    """`load` asserts that nothing is missing or unexpected; old buffers are neither."""
    model = load(factored / name)
    expected = expected_of(factored / name)
    with torch.no_grad():
        assert torch.equal(model(expected["ids"], attention_mask=expected["mask"]).logits, expected["logits"])
    model.save_pretrained(tmp_path)
    before, after = (load_file(root / "model.safetensors") for root in (factored / name, tmp_path))
    kept = {key for key in before if not key.endswith(("attn.bias", "masked_bias", "inv_freq"))}
    assert after.keys() == kept
    assert len(kept) == len(before) - 3
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in kept)
    again = load(tmp_path, core_format="csr")
    with torch.no_grad():
        logits = again(expected["ids"], attention_mask=expected["mask"]).logits
    assert (logits - expected["logits"])[expected["mask"].bool()].abs().amax() <= 2e-5


def test_a_half_precision_checkpoint_keeps_its_bitmaps(tmp_path: Path) -> None:
    write_factored(tmp_path / "half", "llama-gqa", torch.bfloat16)
    model = load(tmp_path / "half", dtype="auto")
    file = load_file(tmp_path / "half" / "model.safetensors")
    for key, tensor in stored_state(model).items():
        assert torch.equal(tensor, file[key].to(tensor.dtype)), key


def test_split_between_layers_with_one_on_disk(factored: Path, tmp_path: Path) -> None:
    """Biases beside factors too: a module's tensors are there only while it runs itself."""
    pytest.importorskip("accelerate")
    for name in ("qwen2-tied", "opt-tied"):
        folder, prefix = factored / name, "model" if name == "qwen2-tied" else "model.decoder"
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
