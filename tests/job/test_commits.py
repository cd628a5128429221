"""`resume.every: auto`: how often hidden states are committed, and that a run directory keeps to it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.schema import Manifest
from pipeline.cost_model.commits import REPEATED_SECONDS, committed_bytes, committing_seconds, layers_per_commit
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import Prices, prices_of
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.work import layer_work
from pipeline.driver.ledger_keys import SCHEDULE
from pipeline.job import commits
from pipeline.job.commits import commit_interval
from stores.ledger import Ledger
from tests.families.geometries import LLAMA_70B, llama, manifest

TEXT = {"text": {"files": ["text.txt"]}, "samples": 256, "sequence_length": 4096, "shards": 256}
LAYERS = 80


def prices_for(propagate: str, workers: int = 1, importance: int = 0) -> Prices:
    job, geometry = manifest(keep=0.8, calibration={**TEXT, "propagate": propagate}), llama(**LLAMA_70B)
    work = layer_work(PlannedJob.of(job, geometry))
    return Prices(work, rates_of("H200"), PlannedPasses(LAYERS, 256, workers, importance, propagate == "compressed"))


@pytest.mark.parametrize("propagate", ["dense", "compressed"])
@pytest.mark.parametrize("workers", [1, 8, 64])
@pytest.mark.parametrize("slower", [1.0, 30.0, 1000.0])
def test_the_fewest_layers_whose_commits_cost_little(propagate: str, workers: int, slower: float) -> None:
    """Commits take 5 % of a pass or less, and would not with one layer less; unless too much would be lost."""
    prices = prices_for(propagate, workers)
    fast = prices.rates
    rates = replace(fast, products=fast.products / slower, double=fast.double / slower, memory=fast.memory / slower)
    prices = replace(prices, rates=rates)
    every, phases = layers_per_commit(prices), phase_seconds(prices)
    names = ("statistics", "reduce", "solve", "propagate") if propagate == "compressed" else ("statistics", "reduce")
    layer_s = sum(phases[name] for name in names) / LAYERS
    share = committing_seconds(prices) / layer_s
    assert share > prices.work.hidden_bytes / prices.nodes / rates.disk / layer_s
    assert 1 <= every <= LAYERS
    assert every == 1 or every * layer_s <= REPEATED_SECONDS
    assert every == 1 or share / (every - 1) > 0.05
    assert share / every <= 0.05 or every == LAYERS or (every + 1) * layer_s > REPEATED_SECONDS


def test_the_quickest_pass_decides() -> None:
    """Importance alone takes a forward pass a layer, and writes as much as the walk, or both for some of the shards."""
    never, some, always = (prices_for("compressed", importance=importance) for importance in (0, 64, 256))
    alone, both, hidden_bytes = layers_per_commit(never), layers_per_commit(always), never.work.hidden_bytes
    assert 1 < alone < both < LAYERS
    assert layers_per_commit(some) == pytest.approx(both, abs=1)
    assert committed_bytes(never, 8) == 9 * hidden_bytes  # before layers 8, 16, … 72
    assert committed_bytes(some, 8) == 9 * hidden_bytes * 5 // 4
    assert committed_bytes(some, 80) == 0


@pytest.mark.parametrize("kind", ["model", "local"])
def test_only_gradients_of_the_model_are_committed(kind: str) -> None:
    text = {**TEXT, "propagate": "dense", "gradient": {"kind": kind}}
    job = manifest({"method": "loss_aware"}, keep=0.8, calibration=text, resume={"every": 1})
    prices = prices_of(PlannedJob.of(job, llama(**LLAMA_70B)), rates_of("H200"))
    never = replace(prices, passes=replace(prices.passes, every=0))
    assert (phase_seconds(prices)["gradient"] > phase_seconds(never)["gradient"]) == (kind == "model")


def job_of(ledger: Ledger, every: int | str, said: list[str], **fields: Any) -> Any:
    asked: Manifest = manifest(keep=0.8, **{"calibration": TEXT, "resume": {"every": every}, **fields})
    planned = PlannedJob.of(asked, llama(**LLAMA_70B))
    inputs = SimpleNamespace(manifest=asked, geometry=planned.geometry, planned=planned, dtype=torch.bfloat16)
    observer = SimpleNamespace(say=lambda line, level=logging.INFO: said.append(line))
    plan = SimpleNamespace(kept=0.8)
    return SimpleNamespace(manifest=asked, inputs=inputs, ledger=ledger, observer=observer, plan=plan)


def test_a_run_directory_keeps_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rates are when it goes on; a number that is given goes before."""
    ledger, said = Ledger(tmp_path), []  # type: tuple[Ledger, list[str]]
    gpus: dict[str, Any] = {"workers": {"max": 8, "gpus": 1}}
    assert commit_interval(job_of(ledger, 3, said), {"device": "CPU"}) == 3
    assert ledger.get(SCHEDULE) is None
    assert said == []
    chosen = commit_interval(job_of(ledger, "auto", said, **gpus), {"device": "NVIDIA H200"})
    assert 1 < chosen <= LAYERS
    assert said == [f"resume.every: auto: hidden states are committed every {chosen} layers"]

    def slow(*_: object) -> Rates:
        return replace(rates_of("H200"), products=1e12, double=1e11)

    monkeypatch.setattr(commits, "measured_rates", slow)
    assert commit_interval(job_of(ledger, "auto", said), {"device": "CPU"}) == chosen
    assert commit_interval(job_of(ledger, 2, said), {"device": "CPU"}) == 2
    assert commit_interval(job_of(Ledger(tmp_path / "other"), "auto", said), {"device": "CPU"}) < chosen


def test_a_gpu_without_rates_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    job = job_of(Ledger(tmp_path), "auto", said, workers={"gpus": 1})
    assert commit_interval(job, {"device": "NVIDIA B300"}) >= 1
    assert said[0].startswith("resume.every: auto: no rates of NVIDIA B300 are known; those of NVIDIA H200")


def test_without_text_there_is_nothing_to_commit(tmp_path: Path) -> None:
    job = job_of(Ledger(tmp_path), "auto", [], calibration=None)
    assert commit_interval(job, {"device": "CPU"}) == 1
