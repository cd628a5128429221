"""`--in-process`: a job, a sweep and an evaluation in one process, without Ray. The bytes: `test_job_variants.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import workers.pools
from tests.end_to_end.jobs import MakeJob, Sweep, command
from workers.in_process_pool import NAME, InProcessPool

ALL_THREE = """
import sys
from pipeline import evaluate, run, sweep
manifest, plan, output, text = sys.argv[1:]
assert run.main([manifest, "--in-process"]) == 0
assert evaluate.main([output, "--text", text, "--window", "16", "--in-process"]) == 0
assert sweep.main([plan, "--in-process"]) == 0
assert not [name for name in sys.modules if name.partition(".")[0] == "ray"]
"""
POINTS: list[dict[str, Any]] = [{"methods": [{"method": "flat_llm"}]}]


def test_ray_is_not_even_imported(job: MakeJob, scored: Path) -> None:
    made, plan = job(), Sweep(job(), POINTS, keep=[0.7]).write()
    names = map(str, (made.manifest, plan, made.output, scored))
    ended = subprocess.run([sys.executable, "-c", ALL_THREE, *names], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "without Ray" in ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--address", "10.0.0.1:6379"), "--address 10.0.0.1:6379: --in-process computes without Ray"),
        (("--set", "workers.max=2"), "workers.max: 2: --in-process has one worker"),
    ],
)
def test_options_that_need_ray_are_refused(options: tuple[str, ...], said: str, job: MakeJob) -> None:
    made = job()
    ended = made.run("--in-process", *options)
    assert ended.code == 2
    assert said in ended.err
    assert not made.run_dir.exists()


def test_evaluate_and_sweep_refuse_the_same(job: MakeJob, llama: Path, text: Path) -> None:
    ended = command("evaluate", str(llama), "--text", str(text), "--workers", "2", "--in-process")
    assert (ended.code, "--workers: 2: --in-process has one worker" in ended.err) == (2, True)
    ended = command("sweep", str(Sweep(job(), POINTS).write()), "--in-process", "--set", "workers.max=3")
    assert (ended.code, "workers.max: 3: --in-process has one worker" in ended.err) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(job: MakeJob) -> None:
    made = job(**{"workers.gpus": 1})
    ended = made.run("--in-process")
    assert (ended.code, "workers.gpus: 1: torch sees no GPU" in ended.err) == (2, True)


def test_threads_are_those_of_the_manifest(job: MakeJob, inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), set()

    class Watched(InProcessPool):
        def wait(self) -> tuple[Any, Any]:
            seen.add(torch.get_num_threads())
            return super().wait()

    monkeypatch.setattr(workers.pools, "InProcessPool", Watched)
    summary = job(methods=[{"method": "svd"}], calibration=None, **{"workers.cpus": 2}).run().json
    assert seen == {2}
    assert torch.get_num_threads() == before
    assert list(summary["peak_bytes"]["workers"]) == [NAME]
    assert summary["seconds"]["units"]["solve"][0] > 0
