"""Reports and a sweep's page as headless Chromium shows them: phone and desktop, light and dark, and on paper."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.sweeping.sweep_page import render_sweep
from stores.ledger import Ledger
from tests.contrast import contrast
from tests.end_to_end.jobs import Job, command
from tests.sweeping.test_results import results

LAYERS = 3  # of the fixture `llama`
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


def report(job: Job) -> str:
    assert command("report", str(job.run_dir)).code == 0
    return (job.run_dir / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def pages(job: Callable[..., Job], inline: None, scored: Path, llama: Path, tmp_path: Path) -> dict[str, str]:
    """By what has become of the run; the sweep has every kind of column."""
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16}}
    made = job(methods=[{"method": "loss_aware"}], evaluation=evaluation, **{"calibration.propagate": "dense"})
    assert made.run().code == 0
    found = {"done": report(made), "sweep": render_sweep(results(8))}
    for key in ("complete", "layer/00002"):
        Ledger(made.run_dir / "ledger").retract(key)
    (made.run_dir / "ended.json").unlink()
    found["killed"] = report(made)
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    for path in broken.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.up_proj.weight"][0, 7] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    failing = job(broken)
    assert failing.run().code == 2
    return {**found, "failed": report(failing)}


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
