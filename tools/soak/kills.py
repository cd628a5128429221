"""Interrupt jobs until they are done. Their OUTPUT must have the bytes of an undisturbed job.

    python -m tools.soak.kills [disk] [bucket] [signals] [together] [--times N] [--ray N] [--seed S]
        [--only NAME] [--match TEXT] [--errors SHARE] [--server URL]

- disk: a job of every method is killed at named points, at power cuts and at random times.
- bucket: so is a job whose files all lie in a bucket. Meanwhile a share of all requests gets a 500, a 503, no answer,
  half an answer or a slow one, or is done and its answer lost. Without `--server`, moto's server runs on loopback.
- signals: SIGTERM and SIGINT, half of them in the first seconds, while modules are imported and Ray starts. The command
  must stop with exit code 75 within 30 s and without a traceback.
- together: a second command starts beside a job, in its RUN_DIR or OUTPUT. One of them ends the job, the other is
  refused by name.

`disk` and `bucket` kill driver and worker in one process `--times` times, then, with Ray, the driver, a worker, the
raylet or all of them `--ray` times. `--only loss_aware --match gradient --ray 0` kills during the backward pass alone:
where the ledger key or the path of what becomes durable holds the text. Prints a line per job; exits 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from stores.bucket import Bucket
from tests import buckets, factories
from tests.end_to_end.children import Child, Hook, end_group
from tests.end_to_end.jobs import Job, file_digests
from tests.faults import Proxy

FLAT, LESTD, JOINT, LOSS = ({"method": name} for name in ("flat_llm", "lestd", "joint_rank_k", "loss_aware"))
LORC, INPUT = {"method": "lorc", "cache_keep": 0.5}, {"weighting": "input"}
DENSE = {"calibration.propagate": "dense"}
REFINED = {"budget.keep": 0.6, "calibration.samples": 40, "quantize": {"bits": 4, "group": None}, **DENSE}
JOBS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [FLAT]},
    "flat_llm, every 2": {"methods": [FLAT], "resume.every": 2},
    "flat_llm, dense": {"methods": [FLAT], **DENSE},
    "lorc": {"methods": [LORC], "budget": None},
    "lorc, input": {"methods": [LORC | INPUT], "budget": None},
    "lestd": {"methods": [LESTD]},
    "lestd, one threshold": {"methods": [LESTD | {"threshold": "model"}]},
    "lestd, input, dense": {"methods": [LESTD | INPUT], **DENSE},
    "joint_rank_k": {"methods": [JOINT], "budget.keep": 0.8},
    "joint_rank_k, input": {"methods": [JOINT | INPUT], "budget.keep": 0.8},
    "flat_llm and joint_rank_k": {"methods": [FLAT, {**JOINT, "mlp": False}]},
    "loss_aware": {"methods": [LOSS], "budget.keep": 0.8, **DENSE},
    "loss_aware, every 2": {"methods": [LOSS], "budget.keep": 0.8, "resume.every": 2, **DENSE},
    "loss_aware, refined": {**REFINED, "methods": [LOSS | {"refine": {"steps": 15}}]},
    "loss_aware, mixed inputs": {**REFINED, "methods": [LOSS | {"refine": {"steps": 15, "inputs": "mixed"}}]},
    "flat_llm and lorc": {"methods": [FLAT, {"method": "lorc", "value": False}], **DENSE},
}
POINTS = ("commit", "file", "remove", "sync")
VICTIMS = {
    "driver": (),
    "all": (),
    "worker": ("ray::WorkerActo", "ray::lamina"),
    "raylet": ("raylet",),
}  # process names
ERRORS = ("500", "503", "silent", "lost", "cut", "slow")
REQUESTS = {"at a request": "silent", "behind a request": "lost"}  # kind of kill -> what the server does with it
LIFE_REQUESTS, LIFE_S = 400, 6.0  # about as many as a job makes, and takes in one process
RAY_S, EARLY_S, BOOT_S, STOP_S, PATIENCE_S = 10.0, 8.0, 0.1, 30.0, 120.0
REFUSED = 2
Digests = dict[str, str]
Outcome = tuple[str, Counter[str], str]  # a job, its interruptions by kind, and what is wrong
BESIDE: dict[str, Callable[[Job, Path], tuple[str, list[str]]]] = {  # name -> command and arguments beside a job
    "the same manifest": lambda job, _: ("run", [str(job.manifest)]),
    "another manifest": lambda job, _: ("run", [str(job.manifest), "--set", "budget.keep=0.8"]),
    "another run_dir": lambda job, other: ("run", [str(job.manifest), "--set", f"run_dir={other}"]),
    "another output": lambda job, other: ("run", [str(job.manifest), "--set", f"output={other}"]),
    "--fresh": lambda job, _: ("run", [str(job.manifest), "--fresh"]),
    "status": lambda job, _: ("status", [str(job.run_dir)]),
    "report": lambda job, other: ("report", [str(job.run_dir), "--out", f"{other}.html"]),
    "verify": lambda job, _: ("verify", [str(job.output)]),
    "evaluate": lambda job, _: ("evaluate", [str(job.output), "--text", str(job.text), "--window", "64"]),
    "export": lambda job, other: ("export", [str(job.output), "--to", "dense", str(other)]),
}


@dataclass(frozen=True)
class Life:
    """One run of a job. `struck`: it was interrupted."""

    kind: str
    struck: bool
    code: int
    log: str
    fault: str = ""


@dataclass(frozen=True)
class Inputs:
    """A model and a text in a scratch folder, and the random numbers of the soak."""

    root: Path
    model: Path
    text: Path
    coin: random.Random

    def job(self, changes: Mapping[str, Any], bucket: str | None = None) -> Job:
        """Write a new job, whose files all lie in a bucket if there is one."""
        root = Path(tempfile.mkdtemp(prefix="job-", dir=self.root))
        places = buckets.job_places(bucket) if bucket else {}
        return Job(root, self.model, self.text, {**changes, **places}).write()

    def reference(self, changes: Mapping[str, Any]) -> Digests:
        """Run a job undisturbed; return the digests of its output."""
        job = self.job(changes)
        child = Child("run", [str(job.manifest)], job.root.with_suffix(".log"))
        assert child.end() == 0, child.said
        return file_digests(job.output)


def disturb(
    begin: Callable[[], Job], live: Callable[[Job, bool], Life], times: int, expected: Digests
) -> tuple[Counter[str], str]:
    """Run jobs until they were interrupted `times` times. Return the interruptions by kind, and the fault.

    A job is resumed after each interruption. When it ends, its OUTPUT is compared and the next job begins. The last job
    is not interrupted. `live` runs a job once, undisturbed if the flag is True.
    """
    struck, job = Counter[str](), begin()
    while True:
        last = struck.total() >= times
        life = live(job, last)
        struck[life.kind] += life.struck
        fault = life.fault
        if life.code == 0:
            fault = fault or differing(job, expected)
        elif not life.struck:
            fault = fault or f"exit code {life.code}"
        if fault or (last and life.code == 0):
            return struck, f"{fault}\n{life.log[-3000:]}" if fault else ""
        job = begin() if life.code == 0 else job


def differing(job: Job, expected: Digests) -> str:
    """Name the files of OUTPUT that differ; in a bucket, those that do not name the place of a file."""
    place, besides = str(job.document()["output"]), frozenset[str]()
    if place.startswith("s3://"):
        digests, besides = buckets.digests(Bucket(place)), frozenset(buckets.NAME_PLACES)
    else:
        digests = file_digests(job.output)
    changed = dict(digests.items() ^ expected.items()).keys() - besides - {".lamina.lock"}
    return f"{', '.join(sorted(changed))} differ" if changed else ""


def live_in_process(
    job: Job,
    kind: str,
    *,
    hook: Hook | None = None,
    delay_s: float | None = None,
    prepare: Callable[[], None] | None = None,
    started: Callable[[Child | None], None] = lambda _: None,
) -> Life:
    """Run driver and worker in one process, killed by the hook, by `started`, or after a delay."""
    child = Child("run", [str(job.manifest)], job.root.with_suffix(".log"), hook, prepare=prepare)
    started(child)
    if delay_s is not None:
        child.process.join(delay_s)
        child.kill()
    code = child.end()
    started(None)
    return Life(kind, code == -signal.SIGKILL, code, child.said)


def live_with_ray(
    job: Job,
    kind: str,
    after_s: float,
    strike: Callable[[subprocess.Popen[bytes]], bool],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Life, float]:
    """Run the command as a user does; `strike` it after some seconds, until it returns True.

    Return also the seconds from then to the end.
    """
    log, struck = job.root.with_suffix(".log"), False
    with log.open("w") as file:
        command = [sys.executable, "-m", "pipeline.run", str(job.manifest)]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    due = time.monotonic() + after_s
    while process.poll() is None and not struck:
        struck = time.monotonic() > due and strike(process)
        time.sleep(0.05)
    struck_at = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)
    seconds = time.monotonic() - struck_at
    end_group(process.pid)
    return Life(kind, struck, process.wait(), log.read_text()), seconds


def kill_victim(victim: str, process: subprocess.Popen[bytes]) -> bool:
    """Kill a process of a running command, or all of them. Return False if there is none of the kind yet."""
    if victim in ("driver", "all"):
        (os.killpg if victim == "all" else os.kill)(process.pid, signal.SIGKILL)
        return True
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name().startswith(VICTIMS[victim]):
            child.kill()
            return True
    return False


def killed_with_ray(job: Job, last: bool, coin: random.Random, environment: Mapping[str, str] = os.environ) -> Life:
    """Kill one of the processes of a job at a random time."""
    victim = coin.choice(sorted(VICTIMS))
    delay_s = math.inf if last else coin.uniform(0.2, 1.0) * RAY_S
    return live_with_ray(job, f"Ray: {victim}", delay_s, partial(kill_victim, victim), environment)[0]


def killed_on_disk(job: Job, last: bool, coin: random.Random, match: str) -> Life:
    """Kill at a named point (only where `match` is in the key or path), at a power cut, or at a random time."""
    kind = "nothing" if last else coin.choice([*POINTS, "power cut", "power cut", *([] if match else ["random"])])
    if kind not in (*POINTS, "power cut"):  # no hook counts the durable writes of this process: later cuts begin anew
        shutil.rmtree(f"{job.root}.shadow", ignore_errors=True)
        return live_in_process(job, kind, delay_s=coin.uniform(0.0, LIFE_S / 2) if kind == "random" else None)
    point = "sync" if kind == "power cut" else kind
    cut = coin.randrange(2**32) if kind == "power cut" else None
    nth = coin.randint(1, 40 if point == "sync" else 4)
    hook = Hook(point, nth, match, after=coin.random() < 0.5, disk=str(job.root), cut=cut)
    return live_in_process(job, kind, hook=hook)


class FailingServer:
    """Decides which requests fail, and counts them; kills a child at its nth request."""

    def __init__(self, coin: random.Random, share: float) -> None:
        self.coin, self.share = coin, share
        self.failures: Counter[str] = Counter()
        self.child: Child | None = None
        self.remaining, self.failure = 0, ""

    def aim(self, child: Child | None, failure: str) -> None:
        """Kill the child at one of its next requests, which is done (`lost`) or is not (`silent`)."""
        self.child, self.failure, self.remaining = child, failure, self.coin.randint(1, LIFE_REQUESTS)

    def __call__(self, method: str, path: str, nth: int) -> str | None:
        self.remaining -= 1
        if self.child is not None and self.remaining <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            return self.failure
        if self.coin.random() >= self.share:
            return None
        failure = self.coin.choice(ERRORS)
        self.failures[failure] += 1
        return failure


def killed_in_bucket(job: Job, last: bool, server: FailingServer, environment: dict[str, str]) -> Life:
    """Kill at a request, or at a random time, while requests fail."""
    kind = "nothing" if last else server.coin.choice([*REQUESTS, "at any time"])
    live = partial(live_in_process, job, kind, prepare=partial(buckets.use, environment))
    if kind in REQUESTS:
        return live(started=lambda child: server.aim(child, REQUESTS[kind]))
    return live(delay_s=server.coin.uniform(0.0, LIFE_S) if kind == "at any time" else None)


def signalled(job: Job, last: bool, coin: random.Random, whole_s: float) -> Life:
    """Send SIGTERM or SIGINT, early or at a random time: the command stops in time, resumable."""
    number = coin.choice([signal.SIGTERM, signal.SIGINT])
    after_s = math.inf if last else coin.uniform(BOOT_S, coin.choice([EARLY_S, whole_s]))

    def send(process: subprocess.Popen[bytes]) -> bool:
        process.send_signal(number)
        return True

    life, seconds = live_with_ray(job, number.name, after_s, send)
    wrong = life.code not in (0, 75) or seconds > STOP_S or "Traceback" in life.log or "*** SIG" in life.log
    return replace(life, fault=f"exit {life.code} after {seconds:.1f} s" if wrong else "")


def run_beside(name: str, job: Job, delay_s: float, expected: Digests) -> str:
    """Run another command beside a job. Return a description of the fault, or an empty string."""
    command, arguments = BESIDE[name](job, job.root / "other")
    first = Child("run", [str(job.manifest)], job.root / "first")
    time.sleep(delay_s)
    second = Child(command, arguments, job.root / "second")
    codes = first.end(), second.end()
    if command == "run" and REFUSED in codes:
        loser, winner = (first, second) if codes[0] == REFUSED else (second, first)
        if f"pid {winner.pid}" not in loser.said and "another job" not in loser.said:
            return f"the refusal names no holder:\n{loser.said}"
    logs = f"{codes}:\n{first.said}\n{second.said}"
    if "Traceback" in logs or "internal error" in logs or 0 not in codes or not set(codes) <= {0, REFUSED}:
        return f"exit codes {logs}"
    if codes[0] == 0 and name not in ("another manifest", "--fresh") and differing(job, expected):
        return "OUTPUT differs from that of an undisturbed job"
    verified = Child("verify", [str(job.output if job.output.exists() else job.root / "other")], job.root / "check")
    return "" if verified.end() == 0 else f"OUTPUT does not verify:\n{verified.said}"


def soak_disk(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Kill the jobs of every method."""
    for name, changes in JOBS.items():
        if arguments.only in (None, name):
            coin = random.Random(f"{arguments.seed} {name}")
            expected = inputs.reference(changes)
            live = partial(killed_on_disk, coin=coin, match=arguments.match)
            yield name, *disturb(partial(inputs.job, changes), live, arguments.times, expected)
            if arguments.ray:
                begin = partial(inputs.job, {**changes, "workers.max": 2})
                yield f"{name}, with Ray", *disturb(begin, partial(killed_with_ray, coin=coin), arguments.ray, expected)


def soak_bucket(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Kill a job in a bucket while requests fail."""
    with contextlib.ExitStack() as stack:
        url = arguments.server or stack.enter_context(buckets.s3_server())
        buckets.use({**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": url})
        proxy, server = Proxy(url), FailingServer(inputs.coin, arguments.errors)
        proxy.spoil = server
        environment = {**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": stack.enter_context(proxy.running())}

        def begin() -> Job:
            address = f"s3://{buckets.make_bucket(url)}"
            buckets.put_inputs(address, inputs.model, inputs.text)
            return inputs.job({}, address)

        expected = inputs.reference({})
        live = partial(killed_in_bucket, server=server, environment=environment)
        yield "bucket", *disturb(begin, live, arguments.times, expected)
        if arguments.ray:
            ray = partial(killed_with_ray, coin=inputs.coin, environment={**os.environ, **environment})
            yield "bucket, with Ray", *disturb(begin, ray, arguments.ray, expected)
        print(f"{len(proxy.requests)} requests, of which failed: {dict(server.failures)}")


def soak_signals(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Stop a job that calibrates, assembles and evaluates on a Ray of its own."""
    changes = {
        "workers": {"min": 2, "max": 2},
        "calibration.samples": 96,
        "evaluation": {"perplexity": {"text": {"files": [str(inputs.text)]}, "window": 24}},
    }
    begin, started = partial(inputs.job, changes), time.monotonic()
    job = begin()
    life, _ = live_with_ray(job, "nothing", math.inf, lambda _: False)
    assert life.code == 0, life.log
    live = partial(signalled, coin=inputs.coin, whole_s=time.monotonic() - started)
    yield "signals", *disturb(begin, live, arguments.times, file_digests(job.output))


def soak_together(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Run two commands at once."""
    expected = inputs.reference({})
    for number in range(arguments.times):
        name = list(BESIDE)[number % len(BESIDE)]
        delay_s = inputs.coin.choice((0.0, inputs.coin.uniform(0, LIFE_S)))
        fault = run_beside(name, inputs.job({}), delay_s, expected)
        yield f"{name}, after {delay_s:.2f} s", Counter({name: 1}), fault


PARTS = {"disk": soak_disk, "bucket": soak_bucket, "signals": soak_signals, "together": soak_together}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--times", type=int, default=20, help="interruptions without Ray, signals, commands beside")
    parser.add_argument("--ray", type=int, default=2, help="kills with Ray, of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(JOBS), help="a job of `disk`")
    parser.add_argument("--match", default="", help="kill only where this is in a ledger key or path")
    parser.add_argument("--errors", type=float, default=0.03, help="the share of requests to the bucket that fail")
    parser.add_argument("--server", help="URL of a running S3 server that takes any key")
    options = parser.parse_args(arguments)
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model, text = factories.make_model(root / "model"), factories.write_text(root / "text.txt", 20_000)
        inputs = Inputs(root, model, text, random.Random(options.seed))
        for part in options.parts or PARTS:
            for name, struck, fault in PARTS[part](inputs, options):
                faults += bool(fault)
                print(f"{name}: {dict(struck)}: {fault or 'ok'}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
