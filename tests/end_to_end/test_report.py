"""The page of a run, and how a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.console.progress import SHOWN
from pipeline.reporting.tables import SCORES
from pipeline.reporting.time_data import joined_bars
from pipeline.sweeping.sweep_page import render_sweep
from stores.headers import DTYPES
from stores.ledger import Ledger
from stores.run_directory import RunDirectory
from tests.contrast import contrast
from tests.end_to_end.jobs import Job, command, without_ray
from tests.end_to_end.report_page import Page
from tests.sweeping.test_results import results

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
def finished_copy(finished: Job) -> Job:
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


def red_classes(page: Page) -> set[str]:
    """Return the classes whose elements the style shows in red."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", page.content)
    return {
        name
        for chosen, rule in rules
        if "color: var(--bad)" in rule
        for name in re.findall(r"\.(\w+)(?=[,\s]|$)", chosen)
    }


def test_nothing_is_red_in_the_report_of_a_healthy_job(page: Page) -> None:
    """The report of a job that failed has red lines."""
    assert red_classes(page) == {"failed", "stopped", "error"}
    assert "done" in page.classes
    assert not page.classes & red_classes(page)


def test_the_same_run_gives_the_same_page(page: Page, finished_copy: Job) -> None:
    assert report(finished_copy).content == page.content


def test_figures_are_the_ledger_s(page: Page, finished_copy: Job) -> None:
    ranks, summary = finished_copy.ledger("ranks"), finished_copy.ledger("complete")["summary"]
    rows = page.tables["layers"][1:]
    assert len(rows) == 6
    heading = page.tables["layers"][0]
    for cells in rows:
        row = dict(zip(heading, cells, strict=True))
        entry = finished_copy.ledger(f"layer/{int(row['layer']):05d}")
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
        assert stored == claimed_bytes(finished_copy.ledger(f"layer/{layer:05d}"))
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
    assert digests["layer 1"] == finished_copy.ledger("layer/00001")["staged"]["sha256"]
    assert digests["compression.json"] == finished_copy.ledger("complete")["contract_sha256"]
    source = json.loads((finished_copy.run_dir / "fingerprint.json").read_text())["fields"]["source"]
    assert {name: digests[name] for name in source} == {name: file["sha256"] for name, file in source.items()}


def claimed_bytes(entry: dict[str, Any]) -> int:
    """Of a staged layer, its norms aside."""
    tensors = entry["staged"]["tensors"].items()
    claimed = [tensor for name, tensor in tensors if "norm" not in name]
    return sum(math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]].itemsize for tensor in claimed)


def test_spectra(page: Page, finished_copy: Job) -> None:
    """Of what was cut by its energy, with every layer in the plot, and what was chosen on its line."""
    (told,) = (caption for caption in page.captions if "beyond a rank" in caption)
    assert "energy of attention" in told
    for layer in range(3):
        found = finished_copy.ledger(f"layer/{layer:05d}")["groups"]["attention"]
        assert found["spectrum"][0] >= found["error"] >= found["spectrum"][-1] == 0.0
        assert sorted(found["spectrum"], reverse=True) == found["spectrum"]


def test_of_a_job_that_was_killed(finished_copy: Job) -> None:
    """No record of its end, two layers, no summary."""
    ledger = Ledger(finished_copy.run_dir / "ledger")
    for key in ("complete", "layer/00002"):
        ledger.retract(key)
    (finished_copy.run_dir / "ended.json").unlink()
    page = report(finished_copy)
    assert "stopped without a message" in page.text
    assert "2 of 3" in page.text
    assert sorted(set(page.column("layers", "layer"))) == ["0", "1"]
    assert page.row("plan", "output bytes")[1:] == ["", ""]
    assert "kept" not in page.tables


def test_of_a_job_that_runs(finished_copy: Job) -> None:
    with RunDirectory(finished_copy.run_dir).lock:
        page = report(finished_copy)
    assert page.content.count('<p class="state running">running</p>') == 1
    Ledger(finished_copy.run_dir / "ledger").retract("complete")
    assert "stopped without a message" in report(finished_copy).text  # that owner left no record of its end


def test_of_a_job_that_has_just_begun(finished_copy: Job) -> None:
    Ledger(finished_copy.run_dir / "ledger").clear()
    shutil.rmtree(finished_copy.run_dir / "logs")
    page = report(finished_copy)
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
    assert page.classes >= {"failed", "error"}
    assert "up" in record["error"]


def test_loss_curves(page: Page, finished_copy: Job) -> None:
    """Where the budget went: the point of each curve that has the ranks which were chosen."""
    ranks = finished_copy.ledger("ranks")["ranks"]
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
        Ledger(finished_copy.run_dir / "ledger").commit(f"curves/{layer:05d}", {"curves": curves})
    page = report(finished_copy)
    assert len(page.captions) == before + 3
    rows = {(row[0], row[1]): row[2:] for row in page.tables["predictions"][1:]}
    assert rows.keys() == {(task.split("/")[0], task.split("/")[2]) for task in expected}
    assert rows["2", "mlp"] == ["400", "0.4000", "3.000e-02"]
    assert f"{math.fsum(expected.values()):.4g}" in page.text


def test_what_the_workers_did(page: Page, finished_copy: Job) -> None:
    """A line for each unit, which the last run's summary counts; cut off by a kill, the rest is still drawn."""
    (path,) = (finished_copy.run_dir / "logs").glob("*.units.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    assert kinds >= {"forward", "collect", "checkgrids", "solve", "write"}
    assert len({line["unit"] for line in lines if line["kind"] == "solve"}) == 6
    assert {line["layer"] for line in lines if line["kind"] in ("forward", "solve", "write")} == {0, 1, 2}
    assert {line["shard"] for line in lines if line["kind"] == "forward"} == {0, 1}
    assert {line["run"] for line in lines} == {finished_copy.run_dir.name}
    assert all(line["seconds"] >= 0 and line["compute_seconds"] <= line["seconds"] * 1.01 + 1e-3 for line in lines)
    held_out = (3 + 3) * 24  # one window through the dense and the compressed layers
    losses = finished_copy.ledger("texts")
    texts = 3 * 24 * sum(losses[kind]["tokens"] // 23 for kind in ("calibration", "evaluation"))
    assert losses["calibration"]["tokens"] == 8 * 23
    assert sum(line["tokens"] for line in lines) == (3 + 3 + 2) * 8 * 24 + held_out + texts
    assert sorted(line["ended"] for line in lines) == [line["ended"] for line in lines]
    assert sum("idle time" in caption for caption in page.captions) == 1
    with open(path, "a") as file:
        file.write('{"unit": "solve/00002')
    assert report(finished_copy).captions == page.captions
    path.unlink()
    assert len(report(finished_copy).captions) == len(page.captions) - 3


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


def test_what_is_not_html_stays_text(finished_copy: Job) -> None:
    path = finished_copy.run_dir / "manifest.yaml"
    content = path.read_text()
    path.write_text(content.replace(f"output: {finished_copy.output}", "output: <script>alert(1)</script>&"))
    page = report(finished_copy)
    assert "<script" not in page.content
    assert "<script>alert(1)</script>&" in page.text


def test_output_and_wrong_input(finished_copy: Job, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.html"
    ended = command("report", str(finished_copy.run_dir), "--output", str(elsewhere))
    assert (ended.code, ended.out) == (0, f"report: {elsewhere} (done)\n")
    assert not (finished_copy.run_dir / "report.html").exists()
    assert Page(elsewhere.read_text())
    assert command("report", str(tmp_path)).code == 2
    assert command("report", str(finished_copy.run_dir), "--output", str(tmp_path / "none" / "x.html")).code == 2


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = 360, 1280
SAID = ("split", "scrolled", "hidden", "cut", "crossing")  # first, where something is wrong
LOOK = """
const look = frame => {
  const page = frame.contentDocument, view = page.defaultView, all = what => [...page.querySelectorAll(what)];
  const colour = (element, what) => view.getComputedStyle(element)[what], box = what => what.getBoundingClientRect();
  const within = (inner, outer) => inner.left > outer.left - 1 && inner.right < outer.right + 1
    && inner.top > outer.top - 1 && inner.bottom < outer.bottom + 1;
  const over = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2
    && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
  return {
    wide: page.documentElement.scrollWidth, given: view.innerWidth,
    plots: all("svg").map(plot => box(plot).width),
    cut: all("svg text").filter(text => !within(box(text), box(text.closest("svg")))).map(text => text.textContent),
    crossing: all("svg").flatMap(plot => [...plot.querySelectorAll("text")].filter((one, place, texts) =>
      texts.slice(0, place).some(other => over(box(one), box(other)))).map(text => text.textContent)),
    paper: colour(page.body, "backgroundColor"), ink: colour(page.body, "color"),
    texts: all("svg text, figcaption, th, dt, .state, .error").map(
      text => colour(text, text instanceof view.SVGElement ? "fill" : "color")),
    split: all("th, td:first-child").filter(cell => !cell.closest("#digests")).flatMap(cell => {
      const text = cell.firstChild, words = text ? text.textContent.split(/(?<=\\s)/) : [], range = page.createRange();
      let at = 0;
      return words.filter(word => {
        range.setStart(text, at); range.setEnd(text, at += word.length);
        const tops = [...range.getClientRects()].map(line => Math.round(line.top));
        return word.trim().length < 30 && new Set(tops).size > 1 && !/[-\\/]/.test(word);
      });
    }),
    hidden: all("details > *").filter(part => !part.checkVisibility()).length,
    scrolled: all("main *").filter(part => part.scrollWidth > part.clientWidth + 1
      && view.getComputedStyle(part).overflowX == "auto")
      .map(part => part.firstElementChild?.id || part.tagName),
  };
};
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => [frame.title, look(frame)]);
  document.getElementById("seen").textContent = JSON.stringify(Object.fromEntries(found));
};
"""


def looked_at(pages: Mapping[str, tuple[str, int]], scheme: str, folder: Path) -> dict[str, Any]:
    """What the browser makes of each page, a content and a width, in a colour scheme."""
    if CHROMIUM is None:
        pytest.skip("no Chromium to look with: apt-get install chromium")
    frames = [
        f'<iframe title="{name}" srcdoc="{escape(content)}" width="{width}" height="4000" style="border: 0"></iframe>'
        for name, (content, width) in pages.items()
    ]
    shown = folder / "look.html"
    shown.write_text(f"<!doctype html><body>{''.join(frames)}<pre id=seen></pre><script>{LOOK}</script></body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    options.append(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    ended = subprocess.run(
        [CHROMIUM, *options, f"file://{shown}"], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(unescape(ended.stdout.partition('<pre id="seen">')[2].partition("</pre>")[0]))
    return found


def page_of(job: Job) -> str:
    assert command("report", str(job.run_dir)).code == 0
    return (job.run_dir / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def pages(job: Callable[..., Job], inline: None, scored: Path, llama: Path, tmp_path: Path) -> dict[str, str]:
    """By what has become of the run; the sweep has every kind of column."""
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16}}
    made = job(methods=[{"method": "loss_aware"}], evaluation=evaluation, **{"calibration.propagate": "dense"})
    assert made.run().code == 0
    found = {"done": page_of(made), "sweep": render_sweep(results(8))}
    for key in ("complete", "layer/00002"):
        Ledger(made.run_dir / "ledger").retract(key)
    (made.run_dir / "ended.json").unlink()
    found["killed"] = page_of(made)
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    for path in broken.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.up_proj.weight"][0, 7] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    failing = job(broken)
    assert failing.run().code == 2
    return {**found, "failed": page_of(failing)}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with: apt-get install chromium")
def test_pages_are_readable(pages: dict[str, str], tmp_path: Path) -> None:
    """Nothing scrolls sideways but a table in its place, plots fill theirs and hold their words, none over another, all
    text stands out from the paper; on paper it is light whatever the reader's scheme, unfolded, and not cut off."""
    assert "exit code 2" in pages["failed"]
    assert "stopped without a message" in pages["killed"]
    shown = {f"{name} {width}": (page, width) for name, page in pages.items() for width in (PHONE, DESKTOP)}
    printed = {f"{name} printed": (page.replace("@media print", "@media all"), 720) for name, page in pages.items()}
    schemes = {scheme: looked_at(shown | printed, scheme, tmp_path) for scheme in ("light", "dark")}
    for scheme, found in schemes.items():
        assert found.keys() == shown.keys() | printed.keys()
        for name, seen in found.items():
            where = f"{name} {scheme}: " + json.dumps({part: seen[part] for part in SAID} | seen)[:1500]
            assert seen["wide"] <= seen["given"], where
            assert seen["split"] == [] or name in printed, where
            assert seen["cut"] == seen["crossing"] == [], where
            assert all(280 <= plot <= 544 for plot in seen["plots"]), where
            assert contrast(seen["ink"], seen["paper"]) > 7, where
            assert min(contrast(text, seen["paper"]) for text in seen["texts"]) > 4.5, where
            light = scheme == "light" or name in printed
            assert (seen["paper"] == "rgb(255, 255, 255)") == light, where
            if name.endswith(f" {PHONE}"):
                assert seen["scrolled"] == [], where
            if name in printed:
                assert (seen["hidden"], seen["scrolled"]) == (0, []), where
    assert len(schemes["light"]["done 360"]["plots"]) > len(schemes["light"]["killed 360"]["plots"]) > 3
    assert schemes["light"]["done 360"]["hidden"] > 0, "digests are folded until they are asked for"
