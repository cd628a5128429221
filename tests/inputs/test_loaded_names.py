"""Sources with other names than the family's files: read as transformers loads them, and otherwise refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM
from manifests.errors import InputError
from pipeline.families.registry import checkpoint_config
from pipeline.inputs.sources import open_dense
from stores.source import SourceCheckpoint
from tests.encoders import ENCODERS, encode_model
from tests.factories import ALL_FAMILIES, EXPERTS, make_model
from tests.renamed_models import HEAD, IN_MEMORY, INSIDE, NEITHER, NO_PREFIX, in_files, rename, with_tensors

LIMIT = 1e-5
UNTIED = {"kimi_linear", "nemotron_h"}  # whose class in transformers ties nothing
CASES = [
    *((family, naming) for family in ALL_FAMILIES for naming in (IN_MEMORY, NO_PREFIX, NEITHER)),
    *((family, HEAD) for family in ALL_FAMILIES if family not in UNTIED),
    ("qwen3_5_text", INSIDE),
    ("qwen3_5_moe_text", INSIDE),
]


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def ours(source: SourceCheckpoint, standard: dict[str, Any]) -> Any:
    """Build Lamina's model with a source's tensors."""
    written = checkpoint_config(standard, standard["forms"], "float32")
    apart = ("model_type", "architectures", "dtype")
    model: Any = LaminaForCausalLM(LaminaConfig(**{name: written[name] for name in written if name not in apart}))
    missing, unexpected = model.load_state_dict(source.read(source.tensors), strict=False)
    assert not unexpected
    assert not missing or (standard["tie_word_embeddings"] and missing == [f"{standard['block']['head']}.weight"])
    return model.eval()


@pytest.mark.parametrize(("family", "naming"), CASES)
def test_names_that_transformers_loads(family: str, naming: str, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", family, tie_word_embeddings=naming == HEAD)
    renamed = rename(plain, tmp_path / "renamed", naming, model_of(plain))
    loaded: Any = AutoModelForCausalLM.from_pretrained(renamed, output_loading_info=True)
    theirs, report = loaded
    assert not any(report.values()), report
    (expected, _), (source, standard) = open_dense(str(plain)), open_dense(str(renamed))
    before, after = expected.read(expected.tensors), source.read(source.tensors)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids_BT = torch.randint(3, 290, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted_BTV, found_BTV = (model(ids_BT).logits for model in (theirs.eval(), ours(source, standard)))
    assert ((found_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max()).item() < LIMIT


@pytest.mark.parametrize("family", [*EXPERTS])
def test_an_expert_of_a_parameter_is_read_by_its_bytes_alone(family: str, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", family)
    source, standard = open_dense(str(rename(plain, tmp_path / "renamed", IN_MEMORY, model_of(plain))))
    experts = f".{standard['mixture']['experts'].rpartition('.')[2]}.0."
    records = [record for name, record in source.tensors.items() if experts in name]
    assert records
    interleaved = {"gpt_oss", "llama4_text"}  # read in blocks, as from their usual files
    if family not in interleaved:
        assert all(record.part is None and record.end - record.begin == record.num_bytes for record in records)


@pytest.mark.parametrize("kind", ENCODERS)
def test_weights_in_stored_formats_without_the_prefix(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32}
    plain = make_model(tmp_path / "plain", "gpt_oss" if kind == "mxfp4" else "llama", **sizes)
    encoded, _ = encode_model(plain, tmp_path, kind)
    renamed = rename(encoded, tmp_path / "renamed", NO_PREFIX, model_of(plain))
    usual, other = (open_dense(str(folder))[0] for folder in (encoded, renamed))
    before, after = usual.read(usual.tensors), other.read(other.tensors)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_a_prefix_that_transformers_does_not_read_is_named(family: str, prefix: str, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", family)
    tensors = {prefix + name: tensor for name, tensor in in_files(plain).items()}
    with pytest.raises(InputError, match=f"all tensors lie under `{prefix}`.*remove it") as refused:
        open_dense(str(with_tensors(plain, tmp_path / "renamed", tensors)))
    assert "model.embed_tokens.weight: missing" in str(refused.value)


@pytest.mark.parametrize("family", sorted(UNTIED))
def test_a_head_alone_is_refused_where_transformers_ties_nothing(family: str, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", family, tie_word_embeddings=True)
    embed = next(name for name in in_files(plain) if "embed" in name)
    tensors = {name: tensor for name, tensor in in_files(plain).items() if name != embed}
    assert "lm_head.weight" in tensors
    with pytest.raises(InputError, match="missing"):
        open_dense(str(with_tensors(plain, tmp_path / "renamed", tensors)))


def test_layers_elsewhere_are_named(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain")
    tensors = {name.replace("model.", "decoder.", 1): tensor for name, tensor in in_files(plain).items()}
    with pytest.raises(InputError, match=r"the layers lie at `decoder\.layers`.*rename them to `model\.layers`"):
        open_dense(str(with_tensors(plain, tmp_path / "renamed", tensors)))


def test_a_missing_tensor_of_a_usual_source_is_no_matter_of_names(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain")
    tensors = in_files(plain)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(InputError, match=r"do not fit together:\n  model\.layers\.1\.mlp\.up_proj\.weight: missing$"):
        open_dense(str(with_tensors(plain, tmp_path / "renamed", tensors)))
