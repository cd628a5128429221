"""Jobs on mixtures of experts, killed at random in every phase: the same bytes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, file_digests
from tests.end_to_end.sources import make_source

MakeJob = Callable[..., Job]
HOOKS = ("commit", "file", "sync", "remove")
SECONDS = 2.0  # of a run, in which a kill by the clock falls
DENSE = {"calibration.propagate": "dense", "workers.experts": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "free": ("qwen3_moe", {"methods": [{"method": "loss_aware"}], **DENSE}),
    "stock": ("deepseek_v3", {"methods": [{"method": "loss_aware", "shapes": "stock"}], "budget.keep": 0.9, **DENSE}),
    "compressed": ("qwen2_moe", {"methods": [{"method": "flat_llm"}], "workers.experts": 2}),
    "merged": ("gpt_oss", {"methods": [{"method": "merge_experts"}], "budget.keep": 0.9, **DENSE}),
    "heapr": ("mixtral", {"methods": [{"method": "heapr", "refit": True}], **DENSE}),
}
COUNTS = {"free": 14, "stock": 12, "compressed": 12, "merged": 6, "heapr": 6}  # 50 kills


def killed_at_random(made: Job, kills: int, source: random.Random) -> set[str]:
    """Kill a job so many times, each time at a durable step or at a moment by the clock; then let it end.

    A job that ends before is begun anew. Return the phases at which it was killed: the last entry's kind.
    """
    phases, dead = set[str](), 0
    while True:
        hook = None
        if dead < kills and source.random() < 0.7:
            hook = Hook(source.choice(HOOKS), nth=source.randint(1, 12), after=source.random() < 0.5)
        fresh = ("--fresh",) if made.output.exists() and (made.output / "compression.json").exists() else ()
        child = Child("run", [str(made.manifest), *fresh], made.root / "log", hook)
        if hook is None and dead < kills:
            time.sleep(source.random() * SECONDS)
            child.kill()
        code = child.end()
        assert code in (0, -signal.SIGKILL), child.said
        dead += code != 0
        if code != 0:
            phases.add(last_entry(made.run_dir / "ledger"))
        if code == 0 and dead >= kills:
            return phases


def last_entry(ledger: Path) -> str:
    """The kind of the newest entry, `start` without one."""
    files = [path for path in ledger.rglob("*") if path.is_file()]
    newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
    return "start" if newest is None else newest.relative_to(ledger).parts[0].partition(".")[0]


@pytest.mark.parametrize(
    ("name", "kills"),
    [("free", 3), *(pytest.param(name, count, marks=pytest.mark.nightly) for name, count in COUNTS.items())],
)
def test_random_kills_change_no_byte(name: str, kills: int, tmp_path: Path, job: MakeJob, inline: None) -> None:
    family, changes = CASES[name]
    source = make_source(tmp_path / "source", family, layers=2)
    whole, killed = job(source, **changes), job(source, **changes)
    assert whole.run().code == 0
    phases = killed_at_random(killed, kills, random.Random(f"{name} {kills}"))
    assert file_digests(killed.output) == file_digests(whole.output)
    print(name, kills, sorted(phases))
    assert len(phases) > kills // 5, phases
