"""The other commands: evaluate scores as transformers does, plan reads headers, status tells how far a job is."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stores.source import SourceCheckpoint
from tests import factories
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import FLAT_LLM, MakeJob, command, load, logits_of, read_tensors
from tests.end_to_end.sources import make_source

LAYERS = 3  # of the fixture `llama`
WINDOW = 40


def perplexity(model: Any, tokenizer: Any, text: str, window: int, prefix: bool = True) -> tuple[float, int]:
    """By the whole model in float32: windows that do not overlap, each behind the BOS that the tokenizer puts before a
    text, or, without it, each token but a window's first; (value, tokens)."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    room = window - prefix
    ids_BT = ids[: len(ids) // room * room].view(-1, room)
    if prefix:
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        ids_BT = torch.nn.functional.pad(ids_BT, (1, 0), value=tokenizer.bos_token_id)
    losses = []
    for batch_BT in ids_BT.split(32):
        logits_BTV = logits_of(model, batch_BT)[:, :-1].double()
        losses.append(
            torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten(), reduction="sum")
        )
    count = len(ids_BT) * (window - 1)
    return math.exp(sum(loss.item() for loss in losses) / count), count


def evaluate(model: Path, text: Path, *options: str) -> Any:
    found = command("evaluate", str(model), "--text", str(text), "--window", str(WINDOW), "--json", *options).json
    assert (found["window"], found["model"]) == (WINDOW, str(model))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    return found


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text for scoring, not a whole number of windows."""
    return factories.write_text(tmp_path_factory.mktemp("scored") / "scored.txt", 6_000, seed=9)


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "opt", "gptj"])
def test_perplexity_of_dense_and_compressed(family: str, tmp_path: Path, scored: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}}
    made = job(source, evaluation=evaluation, methods=[{**FLAT_LLM, "query_key": "head_pca"}])
    summary = made.run().json
    tokenizer = AutoTokenizer.from_pretrained(source)
    values = []
    for path in (source, made.output):
        model = AutoModelForCausalLM.from_pretrained(path) if path == source else load(path)
        expected, count = perplexity(model.eval(), tokenizer, scored.read_text(), WINDOW)
        found = evaluate(path, scored)
        assert found["tokens"] == count == found["windows"] * (WINDOW - 1)
        assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
        assert evaluate(path, scored, "--workers", "2")["loss"] == found["loss"]
        values.append(found["perplexity"])
        expected, count = perplexity(model.eval(), tokenizer, scored.read_text(), WINDOW, prefix=False)
        found = evaluate(path, scored, "--prefix", "none")
        assert (found["tokens"], found["prefix"]) == (count, [])
        assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert abs(values[0] - values[1]) > 0.01
    assert summary["evaluation"]["perplexity"]["perplexity"] == values[1]


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.nightly
def test_trained_model_answers_to_compression(shared_dir: Path, tmp_path: Path, job: MakeJob) -> None:
    """The published figure of the trained model, and what is left of it; the budget to 0.1 %."""
    source = shared_dir / "models" / "babyllama-361"
    stories = json.loads((shared_dir / "text" / "tinystories_1000_clean.json").read_text())
    stories = [story if isinstance(story, str) else story["text"] for story in stories]
    (tmp_path / "calibration.json").write_text(json.dumps(stories[:40]))
    scored = tmp_path / "scored.txt"
    scored.write_text("\n\n".join(stories[850:858]))
    settings = {
        "calibration.text": {"files": [str(tmp_path / "calibration.json")]},
        "calibration.samples": 12,
        "calibration.sequence_length": 256,
        "calibration.micro_batch": 6,
        "budget.keep": 0.8,
        "workers.max": 2,
    }
    made = job(source, **settings)
    made.run().json  # noqa: B018 - asserts the exit code
    dense = sum(tensor.numel() for name, tensor in read_tensors(source).items() if ".layers." in name)
    kept = sum(tensor.numel() for name, tensor in read_tensors(made.output).items() if ".layers." in name)
    assert 0.8 * dense * 0.999 <= kept <= 0.8 * dense
    tokenizer = AutoTokenizer.from_pretrained(source)
    values = []
    for path in (source, made.output):
        model = AutoModelForCausalLM.from_pretrained(path) if path == source else load(path)
        expected, _ = perplexity(model.eval(), tokenizer, scored.read_text(), WINDOW, prefix=False)
        values.append(evaluate(path, scored, "--workers", "2", "--prefix", "none")["perplexity"])
        assert values[-1] == pytest.approx(expected, rel=1e-5)
    assert 1.9 < values[0] < 2.8
    assert values[0] < values[1] < 1.5 * values[0]


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_evaluate_for_people(llama: Path, scored: Path) -> None:
    ended = command("evaluate", str(llama), "--text", str(scored), "--window", str(WINDOW), "--dtype", "stored")
    shown = re.search(r"perplexity ([0-9.]+) over ([0-9,]+) tokens, windows of 40 behind token [0-9]+", ended.out)
    assert ended.code == 0
    assert shown is not None
    assert float(shown[1]) == pytest.approx(evaluate(llama, scored)["perplexity"], abs=1e-4)


@pytest.mark.usefixtures("no_ray")
def test_evaluate_wrong_input(tmp_path: Path, llama: Path, scored: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Then.")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "lamina"}')
    wrong: list[tuple[list[str], str]] = [
        ([str(tmp_path / "nothing"), "--text", str(scored)], "no such directory"),
        ([str(broken), "--text", str(scored)], "neither"),
        ([str(llama), "--text", "nowhere.txt"], "nowhere.txt: missing"),
        (
            [str(llama), "--text", str(short), "--window", "30"],
            "one window has 29 besides the 1 that the tokenizer puts before each",
        ),
        ([str(llama), "--text", str(scored), "--window", "1"], "--window: 1"),
        (
            [str(llama), "--text", str(scored), "--window", "999"],
            "999 is longer than the model's max_position_embeddings 256",
        ),
        ([str(llama), "--text", str(scored), "--window", "9", "--workers", "0"], "--workers: 0"),
    ]
    for arguments, words in wrong:
        window = [] if "--window" in arguments else ["--window", str(WINDOW)]
        ended = command("evaluate", *arguments, *window)
        assert (ended.code, ended.out, words in ended.err) == (2, "", True), (arguments, ended)
        assert "Traceback" not in ended.err
    assert command("evaluate", str(llama)).code == 2


# -- plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    "budget", [{"keep": 0.7}, {"keep": 0.55, "scope": "decoder"}, {"keep": 0.8, "scope": "model"}], ids=str
)
def test_plan_reads_no_weights_and_agrees_with_the_job(
    budget: dict[str, Any], job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(budget=budget)
    with monkeypatch.context() as patch:

        def read(*_: Any) -> Any:
            raise AssertionError("weights are read")

        for name in ("read", "copy_bytes", "file_digests"):
            patch.setattr(SourceCheckpoint, name, read)
        plan = command("plan", str(made.manifest), "--json", "--tflops", "1").json
    assert not made.run_dir.exists()
    assert not made.output.exists()
    summary = made.run().json
    written = sum(tensor.numel() for tensor in read_tensors(made.output).values())
    assert plan["dense_numbers"] == summary["counts"]["parameters"]["dense"]
    assert plan["expected_numbers"] * 0.998 <= written <= plan["expected_numbers"]
    assert sum(path.stat().st_size for path in made.output.glob("*.safetensors")) == pytest.approx(
        plan["output_bytes"], rel=0.1
    )
    assert summary["plan"]["expected_numbers"] == plan["expected_numbers"]
    assert plan["calibration_tokens"] == 8 * 24
    assert (plan["layers"], plan["claimed_layers"]) == (3, 3)


def test_plan_with_ranks_instead_of_a_budget(job: MakeJob, inline: None) -> None:
    made = job(methods=[{**FLAT_LLM, "layers": [1], "ranks": {"value": 7, "mlp": 33}}], budget=None)
    plan = command("plan", str(made.manifest), "--json", "--tflops", "1").json
    made.run().json  # noqa: B018 - asserts the exit code
    written = sum(tensor.numel() for tensor in read_tensors(made.output).values())
    assert plan["expected_numbers"] == written


# -- status ------------------------------------------------------------------------------------------------------------


def test_status_before_while_and_after(tmp_path: Path, job: MakeJob) -> None:
    made = job()
    ended = command("status", str(made.run_dir))
    assert (ended.code, "no run directory" in ended.err) == (2, True)
    pause = tmp_path / "pause"
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="layer/00001", pause=str(pause)))
    wait_for(pause, child)
    state = command("status", str(made.run_dir), "--json").json
    assert (state["state"], state["owner"]["pid"], state["output"]) == ("running", child.pid, str(made.output))
    assert state["layers"] == {"importance_or_statistics": 3, "compressed": 1}
    assert state["summary"] is None
    shown = command("status", str(made.run_dir)).out
    assert f"held by process {child.pid}" in shown
    assert "layers committed, compressed: 1" in shown
    assert "compress layer 0 committed" in shown
    child.kill()
    state = command("status", str(made.run_dir), "--json").json
    assert state["state"] == "killed"
    assert Child("run", [str(made.manifest)], made.root / "log").end() == 0
    (made.run_dir / "manifest.yaml").rename(made.root / "kept.yaml")  # as a kill may leave it, right at the start
    assert "output: unknown" in command("status", str(made.run_dir)).out
    (made.root / "kept.yaml").rename(made.run_dir / "manifest.yaml")
    before = {path: path.stat().st_mtime_ns for path in made.run_dir.rglob("*")}
    state = command("status", str(made.run_dir), "--json").json
    assert (state["state"], state["layers"]["compressed"]) == ("finished", 3)
    assert state["summary"]["counts"]["parameters"] == made.compression()["counts"]["parameters"]
    assert "finished" in command("status", str(made.run_dir)).out
    assert {path: path.stat().st_mtime_ns for path in made.run_dir.rglob("*")} == before
