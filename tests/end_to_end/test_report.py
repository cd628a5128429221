"""`report`: one HTML file that says what the ledger says, of jobs that are done, unfinished or failed."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.console.progress import SHOWN
from pipeline.reporting.tables import SCORES
from pipeline.reporting.time_figures import joined_bars
from stores.headers import DTYPES
from stores.ledger import Ledger
from stores.run_directory import RunDirectory
from tests.end_to_end.jobs import Job, command, without_ray
from tests.end_to_end.report_page import Page

LAYERS = 3  # of the fixture `llama`


def report(job: Job) -> Page:
    written = command("report", str(job.run_dir), "--json").json
    path = job.run_dir / "report.html"
    assert written["report"] == str(path)
    assert written["bytes"] == path.stat().st_size
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path, scored: Path) -> Job:
    """A job that went through."""
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16}}
    made = Job(tmp_path_factory.mktemp("report") / "job", llama, text, {"evaluation": evaluation})
    with without_ray():
        ended = made.run()
    assert ended.code == 0, ended.err
    made.keep()
    return made


@pytest.fixture
def done(finished: Job) -> Job:
    """It as it was, whatever tests have done to it."""
    return finished.put_back()


@pytest.fixture(scope="module")
def page(finished: Job) -> Page:
    """The page of the job as it was."""
    return report(finished.put_back())


def test_one_file_that_needs_nothing_else(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    targets = [link.removeprefix("#") for link in page.links]
    assert all(link.startswith("#") for link in page.links)
    assert set(targets) <= set(page.ids)
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|<script|<link", page.content)
    assert page.content.count("<figure") == page.content.count("<svg") == len(page.captions) > 5
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", page.content))
    assert used <= set(re.findall(r"--([a-z0-9-]+):", page.content))


def test_the_same_run_gives_the_same_page(page: Page, done: Job) -> None:
    assert report(done).content == page.content


def test_figures_are_the_ledger_s(page: Page, done: Job) -> None:
    ranks, summary = done.ledger("ranks"), done.ledger("complete")["summary"]
    rows = page.tables["layers"][1:]
    assert len(rows) == 6
    heading = page.tables["layers"][0]
    for cells in rows:
        row = dict(zip(heading, cells, strict=True))
        entry = done.ledger(f"layer/{int(row['layer']):05d}")
        told = entry["groups"][row["group"]]
        chosen = ranks["ranks"][f"{row['layer']}/0/{row['group']}"]
        assert told["ranks"] == chosen
        assert row["ranks"] == ", ".join(f"{name} {rank:,}" for name, rank in chosen.items())
        assert row["method"] == "flat_llm"
        assert row["importance"] == f"{ranks['importance'][row['layer']]:.4f}"
        assert row["error"] == f"{told['error']:.3e}"
        assert row["kept energy"] == f"{1 - told['error']:.6f}"
        assert row["condition"] == (f"{told['condition']:.3e}" if "condition" in told else "")
    for layer in range(3):
        stored = sum(int(row[6].replace(",", "")) for row in rows if row[0] == str(layer))
        assert stored == claimed_bytes(done.ledger(f"layer/{layer:05d}"))
    for name, pair in summary["counts"].items():
        cells = page.row("kept", name.replace("_", " "))
        assert cells == [f"{pair['dense']:,}", f"{pair['compressed']:,}", f"{pair['compressed'] / pair['dense']:.4f}"]
    assert f"{summary['evaluation']['perplexity']['perplexity']:.4f}" in page.text
    assert {row[0] for row in page.tables["scores"][1:]} <= set(SCORES.values()), "labels are words"
    assert page.row("scores", SCORES["seen"]) == [f"{summary['evaluation']['perplexity']['seen']:.2%}"]
    assert "spectrum [" not in page.text, "a plot shows it"
    for name, seconds in summary["seconds"]["phases"].items():
        assert page.row("seconds", SHOWN.get(name, name)) == [f"{seconds:,.1f}"]
    found = summary["counts"]["bytes"]["compressed"]
    planned = summary["plan"]["output_bytes"]
    assert page.row("plan", "output bytes") == [f"{planned:,}", f"{found:,}", f"{found / planned:.3f}"]
    digests = {row[1]: row[3] for row in page.tables["digests"][1:]}
    assert digests["layer 1"] == done.ledger("layer/00001")["staged"]["sha256"]
    assert digests["compression.json"] == done.ledger("complete")["contract_sha256"]
    source = json.loads((done.run_dir / "fingerprint.json").read_text())["fields"]["source"]
    assert {name: digests[name] for name in source} == {name: file["sha256"] for name, file in source.items()}


def claimed_bytes(entry: dict[str, Any]) -> int:
    """Of a staged layer, its norms aside."""
    tensors = entry["staged"]["tensors"].items()
    claimed = [tensor for name, tensor in tensors if "norm" not in name]
    return sum(math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]].itemsize for tensor in claimed)


def test_spectra(page: Page, done: Job) -> None:
    """Of what was cut by its energy, with every layer in the plot, and what was chosen on its line."""
    (told,) = (caption for caption in page.captions if "beyond a rank" in caption)
    assert "energy of attention" in told
    for layer in range(3):
        found = done.ledger(f"layer/{layer:05d}")["groups"]["attention"]
        assert found["spectrum"][0] >= found["error"] >= found["spectrum"][-1] == 0.0
        assert sorted(found["spectrum"], reverse=True) == found["spectrum"]


def test_of_a_job_that_was_killed(done: Job) -> None:
    """No record of its end, two layers, no summary."""
    ledger = Ledger(done.run_dir / "ledger")
    for key in ("complete", "layer/00002"):
        ledger.retract(key)
    (done.run_dir / "ended.json").unlink()
    page = report(done)
    assert "stopped without a message" in page.text
    assert "2 of 3" in page.text
    assert sorted(set(page.column("layers", "layer"))) == ["0", "1"]
    assert page.row("plan", "output bytes")[1:] == ["", ""]
    assert "kept" not in page.tables


def test_of_a_job_that_runs(done: Job) -> None:
    with RunDirectory(done.run_dir).lock:
        page = report(done)
    assert page.content.count('<p class="state running">running</p>') == 1
    Ledger(done.run_dir / "ledger").retract("complete")
    assert "stopped without a message" in report(done).text  # that owner left no record of its end


def test_of_a_job_that_has_just_begun(done: Job) -> None:
    Ledger(done.run_dir / "ledger").clear()
    shutil.rmtree(done.run_dir / "logs")
    page = report(done)
    assert "0 of 3" in page.text
    assert page.captions == []
    assert int(page.row("plan", "stored numbers")[0].replace(",", "")) > 0


def test_of_a_job_that_failed(job: Callable[..., Job], inline: None, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken"
    shutil.copytree(llama, source)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor.view(-1)[7] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    made = job(source)
    ended = made.run()
    assert ended.code == 2
    page = report(made)
    record = json.loads((made.run_dir / "ended.json").read_text())
    assert "failed" in page.text
    assert "exit code 2" in page.text
    assert record["error"] in page.text
    assert "up" in record["error"]


def test_loss_curves(page: Page, done: Job) -> None:
    """Where the budget went: the point of each curve that has the ranks which were chosen."""
    ranks = done.ledger("ranks")["ranks"]
    before = len(page.captions)
    expected = {}
    for layer in range(3):
        curves = {}
        for task, chosen in ranks.items():
            if task.startswith(f"{layer}/"):
                columns = {name: [1, rank, 2 * rank + 1] for name, rank in chosen.items()}
                loss = [0.5, 0.01 * (layer + 1), 0.0]
                curves[task] = {"ranks": columns, "numbers": [10, 400, 1000], "cache": [1, 2, 3], "loss": loss}
                expected[task] = loss[1]
        Ledger(done.run_dir / "ledger").commit(f"curves/{layer:05d}", {"curves": curves})
    page = report(done)
    assert len(page.captions) == before + 3
    rows = {(row[0], row[1]): row[2:] for row in page.tables["predictions"][1:]}
    assert rows.keys() == {(task.split("/")[0], task.split("/")[2]) for task in expected}
    assert rows["2", "mlp"] == ["400", "0.4000", "3.000e-02"]
    assert f"{math.fsum(expected.values()):.4g}" in page.text


def test_what_the_workers_did(page: Page, done: Job) -> None:
    """A line for each unit, which the last run's summary counts; cut off by a kill, the rest is still drawn."""
    (path,) = (done.run_dir / "logs").glob("*.units.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    assert kinds >= {"forward", "collect", "checkgrids", "solve", "write"}
    assert len({line["unit"] for line in lines if line["kind"] == "solve"}) == 6
    assert {line["layer"] for line in lines if line["kind"] in ("forward", "solve", "write")} == {0, 1, 2}
    assert {line["shard"] for line in lines if line["kind"] == "forward"} == {0, 1}
    assert {line["run"] for line in lines} == {done.run_dir.name}
    assert all(line["seconds"] >= 0 and line["compute_seconds"] <= line["seconds"] * 1.01 + 1e-3 for line in lines)
    held_out = (3 + 3) * 24  # one window through the dense and the compressed layers
    losses = done.ledger("texts")
    texts = 3 * 24 * sum(losses[kind]["tokens"] // 23 for kind in ("calibration", "evaluation"))
    assert losses["calibration"]["tokens"] == 8 * 23
    assert sum(line["tokens"] for line in lines) == (3 + 3 + 2) * 8 * 24 + held_out + texts
    assert sorted(line["ended"] for line in lines) == [line["ended"] for line in lines]
    assert sum("idle time" in caption for caption in page.captions) == 1
    with open(path, "a") as file:
        file.write('{"unit": "solve/00002')
    assert report(done).captions == page.captions
    path.unlink()
    assert len(report(done).captions) == len(page.captions) - 3


def test_bars_that_all_but_touch_are_one() -> None:
    def line(kind: str, began: float, ended: float, worker: str = "a") -> dict[str, Any]:
        return {"kind": kind, "worker": worker, "ended": ended, "seconds": ended - began}

    units = [line("solve", 10, 11), line("solve", 11.05, 12), line("write", 12, 13), line("solve", 13, 14)]
    units += [line("solve", 10, 20, worker="b"), line("solve", 13.5, 13.75)]
    bars = joined_bars(units, "a", "solve", 10.0, 0.1)
    assert bars == [(0.0, 2.0), (3.0, 1.0)]
    assert joined_bars(units, "a", "solve", 10.0, 0.01) == [
        (0.0, 1.0),
        (pytest.approx(1.05), pytest.approx(0.95)),
        (3.0, 1.0),
    ]


def test_what_is_not_html_stays_text(done: Job) -> None:
    path = done.run_dir / "manifest.yaml"
    content = path.read_text()
    path.write_text(content.replace(f"output: {done.output}", "output: <script>alert(1)</script>&"))
    page = report(done)
    assert "<script" not in page.content
    assert "<script>alert(1)</script>&" in page.text


def test_output_and_wrong_input(done: Job, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.html"
    ended = command("report", str(done.run_dir), "--output", str(elsewhere))
    assert (ended.code, ended.out) == (0, f"report: {elsewhere} (done)\n")
    assert not (done.run_dir / "report.html").exists()
    assert Page(elsewhere.read_text())
    assert command("report", str(tmp_path)).code == 2
    assert command("report", str(done.run_dir), "--output", str(tmp_path / "none" / "x.html")).code == 2
