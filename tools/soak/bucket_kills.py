"""A job all of whose files are in a bucket, killed at random on a server that errs at random, to its end.

    python -m tools.soak.bucket_kills [--kills N] [--ray N] [--faults SHARE] [--seed S] [--server URL]

Killed are: the process that is driver and worker, at a request that is done or is not, or at any time; with Ray the
driver, a worker, the raylet, or all. Meanwhile that share of all requests gets a 500, a 503, no answer, half an answer
or a slow one, or is done and its answer lost. Each life goes on where the last one was cut; what is committed in the
end is compared with a job on this disk that nobody disturbed, byte for byte, and then another begins in an empty place.
Without `--server`, moto's runs on loopback. Prints what happened; exits 1 if bytes differ or a job fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stores.bucket import Bucket
from stores.disk import Disk
from stores.storage import Storage
from tests import buckets, factories
from tests.end_to_end.children import Child, end_group
from tests.end_to_end.jobs import Job
from tests.faults import Proxy
from tools.soak.kills import strike

FAULTS = ("500", "503", "silent", "lost", "cut", "slow")
SAYS_WHERE = ("compression.json", "README.md", ".lamina.lock")  # they name the model's place
REQUESTS = {"at a request": "silent", "behind a request": "lost"}  # killed there; what the server then does
LIFE_REQUESTS = 400  # a job's, about
LIFE_S = 6.0
RAY_S = 12.0


class Weather:
    """What befalls requests, and counts of it; kills a child at its nth request."""

    def __init__(self, coin: random.Random, share: float) -> None:
        self.coin, self.share = coin, share
        self.seen: Counter[str] = Counter()
        self.child: Child | None = None
        self.left, self.how = 0, ""

    def aim(self, child: Child | None, requests: int = 0, how: str = "") -> None:
        """At the last of so many requests, which is done (`lost`) or is not (`silent`)."""
        self.left, self.child, self.how = requests, child, how

    def __call__(self, method: str, path: str, nth: int) -> str | None:
        self.left -= 1
        if self.child is not None and self.left <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            return self.how
        if self.coin.random() >= self.share:
            return None
        fault = self.coin.choice(FAULTS)
        self.seen[fault] += 1
        return fault


@dataclass(frozen=True)
class Life:
    """One run: its exit code, whether somebody was killed, and what it said."""

    code: int
    killed: bool
    said: str


def life(job: Job, weather: Weather, environment: dict[str, str], kind: str) -> Life:
    """Driver and worker in one process, killed as `kind` says."""
    coin = weather.coin
    child = Child("run", [str(job.manifest)], job.root / "log", prepare=partial(buckets.use, environment))
    if kind in REQUESTS:
        weather.aim(child, coin.randint(1, LIFE_REQUESTS), REQUESTS[kind])
    elif kind == "at any time":
        child.process.join(coin.uniform(0.0, LIFE_S))
        child.kill()
    code = child.end()
    weather.aim(None)
    return Life(code, code == -signal.SIGKILL, child.said)


def life_with_ray(job: Job, coin: random.Random, environment: dict[str, str], victim: str) -> Life:
    """With Ray, the victim killed at a random time."""
    log, killed = job.root / "log", False
    with open(log, "a") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.run", str(job.manifest)],
            env={**os.environ, **environment},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    ends = time.monotonic() + coin.uniform(0.3, 1.0) * RAY_S
    while process.poll() is None and not killed:
        killed = time.monotonic() > ends and strike(process, victim)
        time.sleep(0.05)
    code = process.wait(300)
    end_group(process.pid)
    return Life(code, killed, log.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """The soak."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20, help="of the process that is driver and worker")
    options.add_argument("--ray", type=int, default=4, help="with Ray")
    options.add_argument("--faults", type=float, default=0.03, help="the share of requests that err")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--server", help="URL of a running S3 server that takes any key")
    given = options.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = given.server or stack.enter_context(buckets.s3_server())
        buckets.use({**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": url})
        proxy, weather = Proxy(url), Weather(random.Random(given.seed), given.faults)
        proxy.spoil = weather
        environment = {**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": stack.enter_context(proxy.running())}
        kills, jobs = _soak(root, url, weather, environment, given)
    by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(kills.items()))
    errors = ", ".join(f"{fault} {count}" for fault, count in sorted(weather.seen.items()))
    print(
        f"{sum(kills.values())} kills ({by_kind}); {len(proxy.requests)} requests, of which erred: {errors or 'none'}"
    )
    print(f"{jobs} jobs ended with the same bytes" if jobs else "a job failed, or its bytes differ")
    return 0 if jobs else 1


def _soak(
    root: Path, url: str, weather: Weather, environment: dict[str, str], given: argparse.Namespace
) -> tuple[Counter[str], int]:
    """Kills by kind, and how many jobs came to their end; 0 where one failed or differs."""
    model, text = factories.make_model(root / "model"), factories.write_text(root / "text.txt", 20_000)
    clean = Job(root / "clean", model, text).write()
    undisturbed = Child("run", [str(clean.manifest)], root / "clean.log")
    assert undisturbed.end() == 0, undisturbed.said
    wanted, coin, kills, jobs = digests(Disk(clean.output)), random.Random(given.seed), Counter[str](), 0
    made, address = None, ""
    while made is not None or sum(kills.values()) < given.kills + given.ray:
        if made is None:
            address = f"s3://{buckets.make_bucket(url)}"
            made = _job(root / f"job-{jobs}", address, model, text)
        so_far = sum(kills.values())
        if given.kills <= so_far < given.kills + given.ray:
            victim = coin.choice(["driver", "worker", "raylet", "all"])
            kind, lived = f"Ray: {victim}", life_with_ray(made, coin, environment, victim)
        else:
            kind = coin.choice([*REQUESTS, "at any time"]) if so_far < given.kills else "nobody"
            lived = life(made, weather, environment, kind)
        kills += Counter({kind: int(lived.killed)})
        print(f"{kind}: {'killed' if lived.killed else 'not killed'}, exit code {lived.code}", flush=True)
        if lived.code != 0 and not lived.killed:
            print(lived.said[-3000:], file=sys.stderr)
            return kills, 0
        if lived.code == 0:
            found, made, jobs = digests(Bucket(f"{address}/output")), None, jobs + 1
            if found != wanted:
                names = [name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)]
                print(f"{address}: {', '.join(sorted(names))} differ", file=sys.stderr)
                return kills, 0
    return kills, jobs


def digests(storage: Storage) -> dict[str, str]:
    """Of all files that do not name a place."""
    return {name: hashlib.sha256(storage.read(name)).hexdigest() for name in storage.files() if name not in SAYS_WHERE}


def _job(root: Path, address: str, model: Path, text: Path) -> Job:
    """All of it in a bucket, where the model is put first."""
    bucket = Bucket(address)
    for name in Disk(model).files():
        bucket.below("model").copy(name, Disk(model), name)
    bucket.copy("text.txt", Disk(text.parent), text.name)
    places: dict[str, Any] = {
        "model.source": f"{address}/model",
        "calibration.text.files": [f"{address}/text.txt"],
        "output": f"{address}/output",
        "run_dir": f"{address}/run",
    }
    return Job(root, model, text, places).write()


if __name__ == "__main__":
    sys.exit(main())
