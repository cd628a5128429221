"""A hundred kills and more: every method's job, killed at named points, at power cuts and at random times, to its end.

    python -m tools.soak.kills [--kills N] [--ray N] [--seed S] [--only NAME] [--match TEXT]

Each job is started again after each kill until it ends, and its OUTPUT is compared byte for byte with that of a run
that nobody disturbed. Prints a line per job; exits 1 if any differs. `--only loss_aware --match gradient --ray 0` kills
during the backward pass alone: where the ledger key or the path of what becomes durable holds the text.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stores.durable import is_hidden
from tests import factories
from tests.end_to_end.children import Child, Hook, end_group
from tests.end_to_end.jobs import Job, file_digests
from tools.benchmarks.jobs import markdown_row

FLAT, LESTD, JOINT, LOSS = ({"method": name} for name in ("flat_llm", "lestd", "joint_rank_k", "loss_aware"))
LORC = {"method": "lorc", "cache_keep": 0.5}
INPUT = {"weighting": "input"}
JOBS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [FLAT]},
    "flat_llm, every 2": {"methods": [FLAT], "resume.every": 2},
    "flat_llm, dense": {"methods": [FLAT], "calibration.propagate": "dense"},
    "lorc": {"methods": [LORC], "budget": None},
    "lorc, input": {"methods": [LORC | INPUT], "budget": None},
    "lestd": {"methods": [LESTD]},
    "lestd, one threshold": {"methods": [LESTD | {"threshold": "model"}]},
    "lestd, input, dense": {"methods": [LESTD | INPUT], "calibration.propagate": "dense"},
    "joint_rank_k": {"methods": [JOINT], "budget.keep": 0.8},
    "joint_rank_k, input": {"methods": [JOINT | INPUT], "budget.keep": 0.8},
    "flat_llm and joint_rank_k": {"methods": [FLAT, {**JOINT, "mlp": False}]},
    "loss_aware": {"methods": [LOSS], "calibration.propagate": "dense", "budget.keep": 0.8},
    "loss_aware, every 2": {
        "methods": [LOSS],
        "calibration.propagate": "dense",
        "budget.keep": 0.8,
        "resume.every": 2,
    },
    "flat_llm and lorc": {"methods": [FLAT, {"method": "lorc", "value": False}], "calibration.propagate": "dense"},
}
TOKENS = 12 // 3 * 24  # of a shard of `Job`
POINTS = ("commit", "file", "remove", "sync")
MOST_RUNS = 200


@dataclass
class Tally:
    """What became of one job. `repeated`: tokens that went through a layer again, by kill."""

    kills: Counter[str] = field(default_factory=Counter)
    repeated: list[int] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    same: bool = True
    said: str = ""


def disturb(job: Job, coin: random.Random, kills: int, seconds: float, tally: Tally, match: str = "") -> None:
    """Kills a job until there are `kills` of them in the tally, unless it ends before; then lets it come to its end.

    `match`: only where this is in the ledger key or path of what becomes durable.
    """
    log, units = job.root.with_suffix(".log"), job.root.with_suffix(".units")
    before: list[str] = []
    for _ in range(MOST_RUNS):
        wanted = sum(tally.kills.values()) < kills
        kinds = [*POINTS, "power cut", "power cut", *([] if match else ["random"])]
        kind = coin.choice(kinds) if wanted else "none"
        hook = None
        if kind in (*POINTS, "power cut"):
            point = "sync" if kind == "power cut" else kind
            cut = coin.randrange(2**32) if kind == "power cut" else None
            most = 40 if point == "sync" else 4
            nth, after = coin.randint(1, most), coin.random() < 0.5
            hook = Hook(point, nth, match, after=after, disk=str(job.root), cut=cut)
        else:  # nobody watches what this process makes durable: later cuts begin with what is there then
            shutil.rmtree(f"{job.root}.shadow", ignore_errors=True)
        child = Child("run", [str(job.manifest)], log, hook)
        if kind == "random":
            child.process.join(coin.uniform(0.0, seconds))
            if child.process.is_alive():
                child.kill()
        code = child.end()
        done = units.read_text().splitlines() if units.exists() else []
        if before:
            again = [unit for unit in done[len(before) :] if unit in before or unit.startswith("replay")]
            tally.repeated.append(TOKENS * len(again))
        before = done
        if code != -signal.SIGKILL:
            tally.said, tally.same = child.said, code == 0
            return
        tally.kills[kind] += 1
    tally.same = False


def disturb_ray(job: Job, coin: random.Random, kills: int, seconds: float, wanted: dict[str, str]) -> Tally:
    """The same with Ray: SIGKILL to the driver, to a worker, to Ray's own processes, or to all, at random times.

    A job that came to its end before there were as many kills begins anew.
    """
    tally = Tally()
    arguments = [sys.executable, "-m", "pipeline.run", str(job.manifest)]
    while True:
        started = time.time()
        known = len(list((job.run_dir / "ledger").glob("*"))) if job.run_dir.exists() else 0
        with open(job.root / "said", "a") as said:
            process = subprocess.Popen(arguments, stdout=said, stderr=said, start_new_session=True)
        last = sum(tally.kills.values()) >= kills
        victim = "none" if last else coin.choice(["driver", "worker", "raylet", "all"])
        ends = started + (1e9 if last else coin.uniform(0.2, 1.0) * seconds)
        fresh = True
        while process.poll() is None and time.time() < ends:
            if fresh and len(list((job.run_dir / "ledger").glob("*"))) > known:
                fresh = False
                tally.restarts.append(time.time() - started)
            time.sleep(0.05)
        while victim != "none" and process.poll() is None:
            if strike(process, victim):
                tally.kills[f"Ray: {victim}"] += 1
                break
            time.sleep(0.05)  # Ray needs seconds to start it
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            strike(process, "all")
            code = process.wait()
        end_group(process.pid)
        if code == 0 or last:
            tally.same, tally.said = code == 0, (job.root / "said").read_text()[-3000:]
            if last or differing(job, wanted):
                return tally
            shutil.rmtree(job.run_dir)
            shutil.rmtree(job.output)


def strike(process: subprocess.Popen[bytes], victim: str) -> bool:
    """Kills; whether there was somebody to kill."""
    if victim in ("driver", "all"):
        (os.killpg if victim == "all" else os.kill)(process.pid, signal.SIGKILL)
        return True
    names = {"worker": ("ray::WorkerActo", "ray::lamina"), "raylet": ("raylet",)}[victim]  # idle, or at a unit
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name().startswith(names):
            child.kill()
            return True
    return False


def differing(job: Job, wanted: dict[str, str]) -> list[str]:
    """The files of OUTPUT that are not as they should be, said."""
    found = {name: digest for name, digest in file_digests(job.output).items() if not is_hidden(name)}
    names = [name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)]
    if names:
        print(f"{job.output}: {', '.join(sorted(names))} differ", file=sys.stderr)
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """The soak."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=12, help="per job, in the process that is driver and worker")
    options.add_argument("--ray", type=int, default=2, help="per job, with Ray and two workers")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=sorted(JOBS))
    options.add_argument("--match", default="", help="kill only where this is in a ledger key or path")
    given = options.parse_args(arguments)
    print(markdown_row(["job", "kills", "tokens repeated per kill: mean", "most", "a layer's tokens", "same bytes"]))
    print(markdown_row(["---"] * 6), flush=True)
    total: Counter[str] = Counter()
    restarts: list[float] = []
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model, text = factories.make_model(root / "model"), factories.write_text(root / "text.txt", 20_000)
        for number, (name, changes) in enumerate(JOBS.items()):
            if given.only not in (None, name):
                continue
            coin = random.Random(f"{given.seed} {name}")
            clean = Job(root / f"clean-{number}", model, text, changes).write()
            started = time.time()
            child = Child("run", [str(clean.manifest)], root / f"clean-{number}.log")
            assert child.end() == 0, child.said
            wanted, seconds = file_digests(clean.output), time.time() - started
            tally, equal, attempt = Tally(), True, 0
            while equal and sum(tally.kills.values()) < given.kills:
                attempt += 1
                made = Job(root / f"job-{number}-{attempt}", model, text, changes).write()
                disturb(made, coin, given.kills, seconds, tally, given.match)
                equal = tally.same and not differing(made, wanted)
            if given.ray:
                other = Job(root / f"ray-{number}", model, text, {**changes, "workers.max": 2}).write()
                with_ray = disturb_ray(other, coin, given.ray, 9.0, wanted)  # about what it takes
                equal = equal and with_ray.same and not differing(other, wanted)
                tally.kills += with_ray.kills
                restarts += with_ray.restarts
                tally.said += "" if with_ray.same else with_ray.said
            total += tally.kills
            same = same and equal
            repeated = tally.repeated or [0]
            row = [name, str(sum(tally.kills.values())), f"{statistics.mean(repeated):.0f}", str(max(repeated))]
            print(markdown_row([*row, str(3 * TOKENS), "yes" if equal else "NO"]), flush=True)
            if not equal:
                print(tally.said, file=sys.stderr)
    print(f"\n{sum(total.values())} kills: {', '.join(f'{kind} {count}' for kind, count in sorted(total.items()))}")
    if restarts:
        print(f"seconds from restart to the first new commit, with Ray: median {statistics.median(restarts):.1f}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
