"""Models and jobs elsewhere: on the hub, and in a bucket."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import InputError, StorageError
from manifests.loading import load_manifest
from pipeline.console.paths import resolve_paths
from stores.bucket import Bucket
from stores.disk import Disk
from stores.hub import open_hub
from stores.model_files import companions
from stores.source import open_source
from stores.storage import matching
from tests import buckets
from tests.end_to_end.children import Child
from tests.end_to_end.hub_server import COMMIT, HubServer, client_of
from tests.end_to_end.jobs import Ended, Job, MakeJob, command, file_digests
from tests.faults import Proxy

LAYERS = 3  # of the fixture `llama`
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


DONE, WRONG_INPUT = 0, 2
REPOSITORY = "someone/small-llama"
EXTRAS = {
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE.txt": b"as you like",
    "NOTICE": b"note",
    "USE_POLICY.md": b"be kind",
    "qwen.tiktoken": b"IQ== 0\n",
    "generation_config.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
UNWANTED = {
    "consolidated.safetensors": b"x" * 300_000,
    "pytorch_model.bin": b"pickle" * 1000,
    "tokenization_x.py": b"print('code')",
    "tokenizer_x.py": b"print('code')",
    "additional_chat_templates/x.py": b"print('code')",
    "LICENSES/elsewhere.txt": b"in a folder",
    "README.md": b"card",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.safetensors": b"x",
}


@pytest.fixture
def files(llama: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in llama.iterdir()} | EXTRAS | UNWANTED


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer(REPOSITORY, files) as server:
        yield server


def ask(name: str, made: Job, hub: HubServer, offline: bool = False) -> Ended:
    """A command, with a cache of its own."""
    with client_of(hub, cache_of(made), offline):
        return command(name, str(made.manifest), "--json")


def cache_of(made: Job) -> Path:
    return made.root / "hub"


def on_hub(job: MakeJob, **changes: Any) -> Job:
    return job(**{"model.source": REPOSITORY, **changes})


def whole(hub: HubServer) -> list[str]:
    """The shards that were fetched whole, each as often as it was."""
    return [name for method, name, part in hub.asked if (method, part) == ("GET", None) and name.startswith("model-")]


def test_plan_reads_configs_and_headers_only(hub: HubServer, job: MakeJob, llama: Path) -> None:
    made = on_hub(job)
    ended = ask("plan", made, hub)
    assert ended.code == DONE, ended.err
    local = command("plan", str(job(llama).manifest), "--json", "--tflops", "1").json
    plan = ended.json
    for field in ("source_bytes", "expected_numbers", "dense_numbers", "read_bytes", "worker_peak_bytes"):
        assert plan[field] == local[field], field
    weights = [asked for asked in hub.asked if asked[1].endswith(".safetensors")]
    assert {name for _, name, _ in weights} == {name for name in hub.files if name.startswith("model-")}
    assert all(method == "GET" and part is not None for method, _, part in weights)
    snapshot = cache_of(made) / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT
    assert not list(snapshot.glob("*.safetensors"))


def test_companions_in_folders_are_fetched_for_a_time_without_network(hub: HubServer, tmp_path: Path) -> None:
    with client_of(hub, tmp_path):
        open_source(REPOSITORY)  # headers of weights are asked for; only they are not kept
    with client_of(hub, tmp_path, offline=True):
        storage = open_hub(REPOSITORY, None, code=False)
        assert EXTRAS.keys() <= {*companions(storage, code=False)}
        assert all(storage.read(name) == content for name, content in EXTRAS.items())
        assert not {*companions(storage, code=False)} & UNWANTED.keys()


def test_a_header_longer_than_the_first_request(job: MakeJob, files: dict[str, bytes]) -> None:
    name = next(name for name in sorted(files) if name.startswith("model-"))
    header = json.loads(files[name][8 : 8 + int.from_bytes(files[name][:8], "little")])
    padded = json.dumps({**header, "__metadata__": {"format": "pt", "long": "x" * 200_000}}).encode()
    body = files[name][8 + int.from_bytes(files[name][:8], "little") :]
    files[name] = len(padded).to_bytes(8, "little") + padded + body
    with HubServer(REPOSITORY, files) as hub:
        ended = ask("plan", on_hub(job), hub)
        assert ended.code == DONE, ended.err
        parts = [part for _, asked, part in hub.asked if asked == name]
        assert len(parts) == 2
        assert parts[1] == (8, 8 + len(padded) - 1)


@pytest.mark.usefixtures("inline")  # the local job
@pytest.mark.parametrize(
    "options", [("--in-process",), pytest.param((), marks=[pytest.mark.ray, pytest.mark.nightly])], ids=["alone", "ray"]
)
def test_a_job_fetches_what_it_needs_and_takes_it_along(
    options: tuple[str, ...], hub: HubServer, job: MakeJob, llama: Path
) -> None:
    """Workers of other processes fetch by `test_each_node_fetches_what_it_reads_once`, and here at night."""
    made, here = on_hub(job), job(llama)
    where = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache_of(made)), "HF_HUB_OFFLINE": "0", "no_proxy": "*"}
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.run", str(made.manifest), *options],
        env={**os.environ, **where}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == DONE, ended.stderr
    fetched = {name for method, name, part in hub.asked if method == "GET" and part is None}
    assert not fetched & UNWANTED.keys()
    assert EXTRAS.keys() <= fetched
    for name, content in EXTRAS.items():
        assert (made.output / name).read_bytes() == content
    assert sorted(whole(hub)) == sorted(name for name in hub.files if name.startswith("model-")), "each shard, once"
    assert command("run", str(here.manifest), "--json").code == DONE
    ours, theirs = file_digests(made.output), file_digests(here.output)
    assert {name for name in ours if name.endswith(".safetensors") and ours[name] != theirs[name]} == set()
    before = len(hub.asked)
    assert ask("run", made, hub).json["already_finished"] is True
    assert not [asked for asked in hub.asked[before:] if asked[1].endswith(".safetensors") and asked[2] is None]
    offline = ask("run", made, hub, offline=True)
    assert offline.code == DONE, offline.err


def test_each_node_fetches_what_it_reads_once(hub: HubServer, job: MakeJob, llama: Path, tmp_path: Path) -> None:
    """The driver opens the model and says its digests without any weights; another node asks nobody but the hub."""
    here, there = tmp_path / "driver", tmp_path / "node"
    with client_of(hub, here):
        source = open_source(REPOSITORY)
        digests = source.file_digests({})
        sent = pickle.dumps(source)
    assert whole(hub) == []
    local = open_source(str(llama))
    assert {name: found.sha256 for name, found in digests.items()} == {
        name: found.sha256 for name, found in local.file_digests({}).items()
    }
    layer = [name for name in source.tensors if ".layers.1." in name]
    shards = {source.tensors[name].file for name in layer}
    hub.asked.clear()
    with client_of(hub, there):
        for _ in range(2):  # two workers
            found = pickle.loads(sent).read(layer)
    assert sorted(whole(hub)) == sorted(shards)
    assert {name for _, name, _ in hub.asked} == shards
    assert all(torch.equal(found[name], tensor) for name, tensor in local.read(layer).items())
    assert not list(here.rglob("*.safetensors"))


def test_a_shard_that_comes_damaged_is_told_and_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    with client_of(hub, tmp_path):
        source = open_source(REPOSITORY)
        name = next(iter(source.tensors))
        file = source.tensors[name].file
        right = hub.files[file]
        source.storage.stamp(file)
        hub.files[file] = right[:-1] + bytes([right[-1] ^ 1])
        with pytest.raises(StorageError, match="the download was damaged and removed"):
            source.read([name])
        hub.files[file] = right
        assert source.read([name])
    with client_of(hub, tmp_path / "other", offline=True), pytest.raises(StorageError, match="check the network"):
        source.read([name])


@pytest.mark.parametrize("name", ["plan", "run"])
def test_a_wrong_manifest_ends_before_weights_are_fetched(name: str, hub: HubServer, job: MakeJob) -> None:
    ended = ask(name, on_hub(job, **{"calibration.sequence_length": 9999}), hub)
    assert ended.code == WRONG_INPUT
    assert "9999 is longer than the model's max_position_embeddings" in ended.err
    assert not [asked for asked in hub.asked if asked[1].endswith(".safetensors") and asked[2] is None]
    hub.asked.clear()
    ended = ask(name, on_hub(job, **{"budget.keep": 7}), hub)
    assert ended.code == WRONG_INPUT
    assert hub.asked == []


def test_pickles_only_is_said(job: MakeJob, files: dict[str, bytes]) -> None:
    kept = {name: content for name, content in files.items() if not name.endswith(("safetensors", "index.json"))}
    with HubServer(REPOSITORY, kept) as hub:
        for name in ("plan", "run"):
            ended = ask(name, on_hub(job), hub)
            assert ended.code == WRONG_INPUT
            assert "only pickled weights (pytorch_model.bin): refused" in ended.err, ended.err
        assert not [asked for asked in hub.asked if asked[1] == "pytorch_model.bin"]


def test_a_server_without_range_requests_is_named(job: MakeJob, files: dict[str, bytes]) -> None:
    with HubServer(REPOSITORY, files, ranges=False) as hub:
        ended = ask("plan", on_hub(job), hub)
        assert (ended.code, "answers no range requests" in ended.err) == (WRONG_INPUT, True), ended.err


def test_no_such_model(hub: HubServer, job: MakeJob) -> None:
    ended = ask("plan", on_hub(job, **{"model.source": "someone/nothing"}), hub)
    assert ended.code == WRONG_INPUT
    assert "the hub does not have it" in ended.err
