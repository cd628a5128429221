"""Exported checkpoints, loaded by the source's own class: the same logits, for every method and family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.errors import StorageError
from stores.disk import Disk
from tests.end_to_end.jobs import Ended, Job, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import FAMILIES, make_source

MakeJob = Callable[..., Job]
METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm", "query_key": "head_pca"}]},
    "lorc": {"methods": [{"method": "lorc", "cache_keep": 0.4, "allocation": "uniform"}], "budget": None},
    "lorc-wide": {"methods": [{"method": "lorc", "cache_keep": 0.8, "allocation": "uniform"}], "budget": None},
    "lestd": {"methods": [{"method": "lestd", "target": "both", "sweeps": 1, "refine_sweeps": 0}]},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k"}]},
    "loss_aware": {"methods": [{"method": "loss_aware"}], "calibration.propagate": "dense"},
}
DENSE = {"calibration.propagate": "dense"}


def export(made: Job, target: str, name: str = "exported", *more: str) -> tuple[Ended, Path]:
    destination = made.root / name
    return command("export", str(made.output), "--to", target, str(destination), "--json", *more), destination


def stock(directory: Path) -> Any:
    """By transformers alone, as any model; nothing missing, nothing left over."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, trust_remote_code=False)
    assert not any(report.values()), report
    return model.eval()


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
