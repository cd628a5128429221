"""Jobs whose model, texts, run directory and output are in a bucket: the bytes are those of a disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from manifests.errors import InputError
from manifests.loading import load_manifest
from pipeline.console.paths import resolve_paths
from stores.bucket import Bucket
from stores.disk import Disk
from stores.storage import matching
from tests import buckets
from tests.end_to_end.children import Child
from tests.end_to_end.jobs import Job, command
from tests.faults import Proxy

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
WRITES_IN_A_LIFE = 59


@pytest.fixture
def address(s3_bucket: str, llama: Path, text: Path, scored: Path) -> str:
    """A bucket that holds the model under `model`, and the texts."""
    buckets.put_inputs(s3_bucket, llama, text, scored)
    return s3_bucket


@pytest.mark.parametrize("propagate", ["compressed", pytest.param("dense", marks=pytest.mark.nightly)])
def test_everything_in_a_bucket(propagate: str, job: MakeJob, address: str, scored: Path, inline: None) -> None:
    changes = {"calibration.propagate": propagate, "evaluation": {"perplexity": {"window": 16}}}
    local = job(**changes, **{"evaluation.perplexity.text.files": ["text"]})
    local.changes = {**changes, "evaluation.perplexity.text.files": [str(scored)]}
    expected = local.run().json
    remote = job(**changes)
    remote.changes = {
        **changes,
        **buckets.job_places(address),
        "evaluation.perplexity.text.files": [f"{address}/scored.txt"],
    }
    summary = remote.run().json
    output = Bucket(f"{address}/output")
    assert buckets.digests(output) == buckets.digests(Disk(local.output))
    assert summary["evaluation"]["perplexity"]["loss"] == expected["evaluation"]["perplexity"]["loss"]
    assert [path.name for path in remote.root.iterdir()] == ["manifest.yaml"], "nothing is on this disk"
    assert not matching(output, [".lamina*"])
    assert remote.run().json["already_finished"]
    status = command("status", f"{address}/run", "--json").json
    assert (status["state"], status["output"], status["layers"]["compressed"]) == ("finished", output.address, 3)
    assert "done" in status["log"][-1]
    report = command("report", f"{address}/run", "--json").json
    assert report["bytes"] == Bucket(f"{address}/run").size("report.html")
    verified = command("verify", output.address, "--source", f"{address}/model")
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["model.source", "calibration.text.files", "output", "run_dir"])
def test_any_mix(place: str, job: MakeJob, address: str, inline: None) -> None:
    local = job()
    assert local.run().code == 0
    mixed = job(**{place: buckets.job_places(address)[place]})
    assert mixed.run().code == 0
    output = Bucket(f"{address}/output") if place == "output" else Disk(mixed.output)
    assert buckets.digests(output) == buckets.digests(Disk(local.output))


@pytest.mark.parametrize("place", ["model.source", "calibration.text.files", "output", "run_dir"])
def test_a_bucket_that_is_not_there_is_named_before_any_work(
    place: str, job: MakeJob, address: str, no_ray: None
) -> None:
    missing = job(**{place: buckets.job_places("s3://no-such-bucket")[place]})
    ended = missing.run()
    assert ended.code == 2, ended.err
    assert "s3://no-such-bucket/" in ended.err
    assert "NoSuchBucket" in ended.err


def test_addresses_in_a_manifest_stay_as_they_are(job: MakeJob, tmp_path: Path) -> None:
    made = job(**{**buckets.job_places("s3://bucket"), "calibration.text.files": ["s3://bucket/a.txt", "b.txt"]})
    given = load_manifest(made.manifest)
    assert resolve_paths(given, None) == given
    settled = resolve_paths(given, tmp_path)
    assert (settled.output, settled.run_dir, settled.model.source) == (given.output, given.run_dir, given.model.source)
    assert settled.calibration is not None
    assert settled.calibration.texts[0][0].files == ("s3://bucket/a.txt", str(tmp_path / "b.txt"))
    with pytest.raises(InputError, match=r"output: s3:///out: not a bucket address; expected s3://BUCKET"):
        resolve_paths(given.model_copy(update={"output": "s3:///out"}), None)


@pytest.mark.nightly
def test_killed_again_and_again(job: MakeJob, address: str, s3_url: str, inline: None) -> None:
    """Each run is killed some writes further: before the server does one, or after. What is committed stays."""
    local = job()
    assert local.run().code == 0
    made, proxy, runs = job(**buckets.job_places(address)), Proxy(s3_url), 0
    with proxy.running() as url:
        prepare = partial(buckets.use, {**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": url})
        while True:
            proxy.spoil = lambda *_: None
            child = Child("run", [str(made.manifest)], made.root / "log", prepare=prepare)
            proxy.spoil = killing(child, after=runs % 2 == 0)
            code = child.end()
            assert code in (0, -signal.SIGKILL), child.said
            if code == 0:
                break
            runs += 1
            assert runs < 40, child.said
    assert runs >= 3
    output = Bucket(f"{address}/output")
    assert buckets.digests(output) == buckets.digests(Disk(local.output))
    assert not matching(output, [".lamina*"])
    done = (made.root / "log.units").read_text().splitlines()
    assert len(done) <= len(set(done)) + runs * 3, "more than a layer was done again after a kill"


def killing(child: Child, after: bool) -> Callable[[str, str, int], str | None]:
    """Kills the child at a write of its: one that is not done, or is done and not answered."""
    writes = 0

    def spoil(method: str, path: str, nth: int) -> str | None:
        nonlocal writes
        if method in ("GET", "HEAD") or "lock" in path:
            return None
        writes += 1
        if writes < WRITES_IN_A_LIFE:
            return None
        if writes == WRITES_IN_A_LIFE:
            os.killpg(child.pid, signal.SIGKILL)
        return "lost" if after and writes == WRITES_IN_A_LIFE else "silent"

    return spoil
