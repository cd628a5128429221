"""Odd fields of a source's config.json: the checkpoint and each export compute what transformers does, or are refused.

The checkpoints are written without a job: every form is dense, so that any difference is a field's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipeline.checkpoint.exporting
from manifests.errors import StorageError
from pipeline.checkpoint.engines import engine_table
from pipeline.checkpoint.targets import TARGETS, export_faults
from pipeline.families.registry import checkpoint_config, standard_config
from tests.end_to_end.jobs import Ended, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_export import stock
from tests.end_to_end.test_export_gguf import as_llama, needs_gguf, read_gguf

SLIDING = {"use_sliding_window": True, "sliding_window": 8}
TYPES = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CASES: list[tuple[str, dict[str, Any], bool]] = [  # family, fields, and whether llama.cpp has a place for them
    ("llama", {"hidden_act": "relu"}, False),
    ("llama", {"hidden_act": "gelu", **NO_TOKENS}, False),
    ("llama", {"hidden_act": "swish", "rms_norm_eps": 0.01, **NO_TOKENS}, True),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}, True),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, False),
    ("llama", {"rope_parameters": YARN}, False),
    ("llama", {"rope_parameters": LONG}, False),
    ("llama", {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.5}, False),
    ("mistral", {"sliding_window": 8, "hidden_act": "gelu"}, False),
    ("mistral", {"sliding_window": None, "head_dim": None, "tie_word_embeddings": True}, True),
    ("qwen2", {**SLIDING, "max_window_layers": 1}, False),
    ("qwen2", {**SLIDING, "max_window_layers": 2, "head_dim": 32}, False),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 1}, False),
    ("qwen3", {**SLIDING, "max_window_layers": 0}, False),
    ("qwen3", {**SLIDING, "layer_types": TYPES, "attention_bias": True}, False),
    ("opt", {"activation_function": "gelu", "enable_bias": False, "tie_word_embeddings": False, **NO_TOKENS}, False),
    ("gptj", {"rotary_dim": 4, "n_inner": None, "layer_norm_epsilon": 0.01}, False),
    ("gptj", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, "head_dim": 32}, False),
]


def as_checkpoint(root: Path, family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[Path, Path]:
    """A source of two layers with these fields in its config.json, and a Lamina checkpoint with its weights."""
    known = {name: value for name, value in fields.items() if not (family == "gptj" and name == "head_dim")}
    source = make_source(root / "source", family, layers=2, dtype=dtype, **known)
    config = json.loads((source / "config.json").read_text()) | fields
    (source / "config.json").write_text(json.dumps(config))
    standard = standard_config(config)
    shutil.copytree(source, root / "output")
    written = checkpoint_config(standard, standard["forms"], str(dtype).removeprefix("torch."))
    (root / "output" / "config.json").write_text(json.dumps(written))
    return source, root / "output"


def export(output: Path, target: str, destination: Path) -> Ended:
    return command("export", str(output), "--to", target, str(destination))


@pytest.mark.sample(5)
@needs_gguf
@pytest.mark.parametrize(("family", "fields", "in_gguf"), CASES, ids=str)
def test_each_export_computes_what_transformers_does(
    family: str, fields: dict[str, Any], in_gguf: bool, tmp_path: Path
) -> None:
    source, output = as_checkpoint(tmp_path, family, **fields)
    ids_BT = some_tokens(320, length=30)  # beyond the window
    expected = logits_of(AutoModelForCausalLM.from_pretrained(source).eval(), ids_BT)
    assert relative_error(logits_of(load(output), ids_BT), expected) < 1e-5
    for target in ("dense", "stock"):
        ended = export(output, target, tmp_path / target)
        assert ended.code == 0, ended.err
        assert relative_error(logits_of(stock(tmp_path / target), ids_BT), expected) < 1e-5
    ended = export(output, "gguf", tmp_path / "model.gguf")
    config = json.loads((output / "config.json").read_text())
    assert ended.code == (0 if in_gguf else 2), ended.err
    assert in_gguf == ("--to gguf" in engine_table(config, 1.0))
    assert "--to stock" in engine_table(config, 1.0)
    if not in_gguf:
        assert "possible targets: --to dense, --to stock" in ended.err
        assert not list(tmp_path.glob("model.gguf*"))
        return
    rope = config["rope_parameters"]
    said, tensors = read_gguf(tmp_path / "model.gguf")
    assert said["llama.context_length"] == config["max_position_embeddings"]
    model = as_llama(said, tensors, None if rope["rope_type"] == "default" else rope)
    assert relative_error(logits_of(model, ids_BT), expected) < 1e-5


@pytest.mark.parametrize(("family", "types"), [("qwen2", TYPES), ("qwen3", ["full_attention", "sliding_attention"])])
def test_exports_say_windows_as_the_source_does(family: str, types: list[str], tmp_path: Path) -> None:
    """Also to engines that read `max_window_layers`, where it can say them; and with a cache."""
    first = types.index("sliding_attention")
    fields = {**SLIDING, "layer_types": types, "max_window_layers": first}
    source, output = as_checkpoint(tmp_path, family, **fields)
    assert export(output, "dense", tmp_path / "dense").code == 0
    written = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert {name: written[name] for name in fields} == fields
    ids_BT = some_tokens(320, length=20)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    tokens = [
        model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **options)
        for model in (AutoModelForCausalLM.from_pretrained(source), load(output), stock(tmp_path / "dense"))
    ]
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize("fields", [{}, {"hidden_act": "relu"}, {"per_layer_config": {"1": {"intermediate_size": 40}}}])
def test_the_card_offers_no_refused_command(fields: dict[str, Any], tmp_path: Path) -> None:
    sized = {"num_hidden_layers": 2, "head_dim": 16, **fields}
    standard = standard_config({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, **sized})
    half = {role: {"form": "pruned", "rank": 20} for role in ("gate", "up", "down")}
    for forms in ([{}, {}], [half, half], [half, {}]):
        config = checkpoint_config(standard, forms, "float32")
        text = engine_table(config, 1.0)
        for target in TARGETS:
            assert f"--to {target} " not in text or not export_faults(config, target)
        assert ("--to" in text) == any(not export_faults(config, target) for target in TARGETS)


@needs_gguf
def test_float64(tmp_path: Path) -> None:
    """Exact in safetensors; llama.cpp has no such type, and nothing is left behind."""
    source, output = as_checkpoint(tmp_path, "llama", torch.float64)
    ended = export(output, "gguf", tmp_path / "files.gguf")
    assert (ended.code, "for numbers of float64; known are float32" in ended.err) == (2, True), ended.err
    assert "AssertionError" not in ended.err
    assert not list(tmp_path.glob("files*"))
    assert export(output, "dense", tmp_path / "dense").code == 0
    ids_BT = some_tokens(320)
    found, expected = (logits_of(stock(place), ids_BT) for place in (tmp_path / "dense", source))
    assert found.dtype == torch.float64
    assert relative_error(found, expected) < 1e-12


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return as_checkpoint(tmp_path, "llama")[1]


FAULTS = [OSError(28, "No space left on device"), StorageError("the disk is gone"), KeyboardInterrupt("stopped")]


@needs_gguf
@pytest.mark.parametrize("fault", FAULTS, ids=["full", "gone", "stopped"])
def test_a_gguf_file_that_fails_leaves_nothing(
    fault: BaseException, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    written: list[Any] = []

    def fail(writer: Any, data: Any) -> None:
        written.append(data)
        if len(written) == 5:
            assert len(list((tmp_path / "files").iterdir())) == 1
            raise fault

    (tmp_path / "files").mkdir()
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    ended = export(output, "gguf", tmp_path / "files" / "model.gguf")
    assert ended.code == (75 if isinstance(fault, KeyboardInterrupt) else 1)
    said = f"writing {tmp_path / 'files' / 'model.gguf'}: No space left" if isinstance(fault, OSError) else str(fault)
    assert said in ended.err
    assert not list((tmp_path / "files").iterdir())


@needs_gguf
@pytest.mark.parametrize("destination", ["none/model.gguf", "s3://bucket/model.gguf"])
def test_a_gguf_file_needs_a_folder_of_this_machine(
    destination: str, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    ended = command("export", str(output), "--to", "gguf", destination)
    assert (ended.code, "its folder is not a directory of this machine" in ended.err) == (2, True), ended.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("fault", FAULTS, ids=["full", "gone", "stopped"])
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_that_fails_leaves_nothing(
    there: bool, fault: BaseException, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither files nor folders that it made, after a layer was written."""
    destination = tmp_path / "a" / "b" / "dense"
    if there:
        destination.mkdir(parents=True)
    faults: Iterator[BaseException | None] = iter([None, fault])
    write = pipeline.checkpoint.exporting.write_shard

    def fail(*arguments: Any) -> Any:
        if (raised := next(faults)) is not None:
            assert len(list(destination.iterdir())) == 1
            raise raised
        return write(*arguments)

    monkeypatch.setattr(pipeline.checkpoint.exporting, "write_shard", fail)
    ended = export(output, "dense", destination)
    assert ended.code == (75 if isinstance(fault, KeyboardInterrupt) else 1)
    assert ("No space left on device" if isinstance(fault, OSError) else str(fault)) in ended.err
    assert (destination.is_dir(), (tmp_path / "a").exists()) == (there, there)
    assert not there or not list(destination.iterdir())
