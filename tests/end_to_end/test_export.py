"""Checkpoints for other programs, and the fields of their configs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline.checkpoint.exporting
from manifests.errors import StorageError
from pipeline.checkpoint.engines import engine_table
from pipeline.checkpoint.targets import TARGETS, export_faults
from pipeline.families.registry import checkpoint_config, standard_config
from stores.disk import Disk
from tests.end_to_end.exports import METHODS, as_llama, export, needs_gguf, read_gguf, stock
from tests.end_to_end.jobs import Ended, MakeJob, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import FAMILIES, make_source

DENSE = {"calibration.propagate": "dense"}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", METHODS)
def test_dense_gives_the_same_logits(name: str, llama: Path, job: MakeJob) -> None:
    made = job(**METHODS[name])
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "dense")
    assert ended.json["bytes"] == sum(path.stat().st_size for path in destination.glob("*.safetensors"))
    model, source = stock(destination), stock(llama)
    assert type(model) is type(source)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in source.state_dict().items()}
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5
    assert relative_error(logits_of(model, ids_BT), logits_of(source, ids_BT)) > 1e-3
    assert AutoTokenizer.from_pretrained(destination)("Anna")["input_ids"]
    assert not list(destination.glob("*.py"))
    assert not (destination / "compression.json").exists()


@pytest.mark.sample(2)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),  # which is not the family's default
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("opt", {}),
        ("gptj", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        *((family, {}) for family in FAMILIES[6:]),
    ],
)
@pytest.mark.parametrize("method", ["flat_llm", "lorc"])
def test_dense_of_every_family(
    family: str, overrides: dict[str, Any], method: str, tmp_path: Path, job: MakeJob
) -> None:
    made = job(make_source(tmp_path / "source", family, layers=2, **overrides), **METHODS[method])
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "dense")
    assert ended.code == 0, ended.err
    ids_BT = some_tokens(320, length=30)
    assert relative_error(logits_of(stock(destination), ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5
    offered = re.findall(r"--to (\w+)", (made.output / "README.md").read_text())
    for target in offered:
        ended, _ = export(made, target, f"{target}.out")
        assert ended.code == 0, ended.err


@pytest.mark.usefixtures("inline")
def test_stock_keeps_one_narrow_width(job: MakeJob) -> None:
    methods = [{"method": "flat_llm", "ranks": {"value": 9, "mlp": 33}}]
    made = job(methods=methods, budget=None)
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "stock")
    assert ended.code == 0, ended.err
    model = stock(destination)
    assert model.config.intermediate_size == 33
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5
    _, dense = export(made, "dense", "filled")
    assert ended.json["parameters"] < sum(p.numel() for p in stock(dense).parameters())
    assert json.loads((dense / "config.json").read_text())["intermediate_size"] == 80


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("allocation", ["importance", "loss"])
def test_uniform_ranks_are_for_stock(allocation: str, job: MakeJob) -> None:
    """As `allocation` alone would not have it: one width, chosen by the budget, and so an ordinary model."""
    made = job(
        methods=[{"method": "flat_llm", "uniform": True, "allocation": allocation}], budget={"keep": 0.8}, **DENSE
    )
    made.run().json  # noqa: B018 - asserts the exit code
    (width,) = {forms["up"]["rank"] for forms in json.loads((made.output / "config.json").read_text())["forms"]}
    ended, destination = export(made, "stock")
    assert ended.code == 0, ended.err
    model = stock(destination)
    assert model.config.intermediate_size == width < 80
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(load(made.output), ids_BT)) < 1e-5


@pytest.mark.usefixtures("inline")
def test_what_cannot_be_is_refused_with_what_would_change_it(job: MakeJob, llama: Path, tmp_path: Path) -> None:
    made = job(methods=[{"method": "flat_llm", "allocation": "importance"}], budget={"keep": 0.6})
    made.run().json  # noqa: B018 - asserts the exit code
    if len({forms["up"]["rank"] for forms in json.loads((made.output / "config.json").read_text())["forms"]}) > 1:
        ended, destination = export(made, "stock")
        assert (ended.code, "uniform: true" in ended.err) == (2, True), ended.err
        assert not destination.exists()
    ended = command("export", str(llama), "--to", "dense", str(tmp_path / "nothing"))
    assert (ended.code, "an ordinary checkpoint (llama)" in ended.err) == (2, True), ended.err
    assert "give the `output` of a job's manifest" in ended.err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    ended = command("export", str(made.output), "--to", "dense", str(tmp_path / "full"))
    assert (ended.code, "not empty" in ended.err) == (2, True), ended.err
    before = sorted(made.output.iterdir())
    ended = command("export", str(made.output), "--to", "dense", str(made.output / "dense"))
    assert (ended.code, "would no longer verify; give another place" in ended.err) == (2, True), ended.err
    assert sorted(made.output.iterdir()) == before


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("target", ["dense", "gguf"])
def test_a_destination_is_tried_before_a_layer_is_computed(
    target: str, job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    made.run().json  # noqa: B018 - asserts the exit code
    (tmp_path / "locked").mkdir()

    def refuse(*_: Any) -> None:
        raise StorageError("Permission denied")

    monkeypatch.setattr(Disk, "prepare", refuse)
    monkeypatch.setattr("pipeline.checkpoint.exporting.cpu_reader", lambda *_: pytest.fail("a layer is read"))
    monkeypatch.setattr("pipeline.checkpoint.gguf_file.cpu_reader", lambda *_: pytest.fail("a layer is read"))
    ended = command("export", str(made.output), "--to", target, str(tmp_path / "locked" / "exported"))
    assert (ended.code, "cannot be used" in ended.err, "Permission denied" in ended.err) == (2, True, True), ended.err
    assert not any((tmp_path / "locked").iterdir())


@pytest.mark.usefixtures("inline")
def test_half_precision(tmp_path: Path, job: MakeJob) -> None:
    made = job(make_source(tmp_path / "source", "llama", dtype=torch.bfloat16), **METHODS["lorc-wide"])
    made.run().json  # noqa: B018 - asserts the exit code
    ended, destination = export(made, "dense")
    assert ended.code == 0, ended.err
    model = stock(destination)
    assert model.dtype == torch.bfloat16
    ids_BT = some_tokens(320)
    whole = logits_of(load(made.output).float(), ids_BT)
    assert relative_error(logits_of(model.float(), ids_BT), whole) < 0.03


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


def export_to(output: Path, target: str, destination: Path) -> Ended:
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
        ended = export_to(output, target, tmp_path / target)
        assert ended.code == 0, ended.err
        assert relative_error(logits_of(stock(tmp_path / target), ids_BT), expected) < 1e-5
    ended = export_to(output, "gguf", tmp_path / "model.gguf")
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
    assert export_to(output, "dense", tmp_path / "dense").code == 0
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
    ended = export_to(output, "gguf", tmp_path / "files.gguf")
    assert (ended.code, "for numbers of float64; known are float32" in ended.err) == (2, True), ended.err
    assert "AssertionError" not in ended.err
    assert not list(tmp_path.glob("files*"))
    assert export_to(output, "dense", tmp_path / "dense").code == 0
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
    ended = export_to(output, "gguf", tmp_path / "files" / "model.gguf")
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
    """An export that fails after a layer removes all its files and folders."""
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
    ended = export_to(output, "dense", destination)
    assert ended.code == (75 if isinstance(fault, KeyboardInterrupt) else 1)
    assert ("No space left on device" if isinstance(fault, OSError) else str(fault)) in ended.err
    assert (destination.is_dir(), (tmp_path / "a").exists()) == (there, there)
    assert not there or not list(destination.iterdir())
