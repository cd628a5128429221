"""Files that are damaged, lost or unsynced are found and computed again, at any kill."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.job import heartbeat
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Ended, Job, MakeJob, command, edit_json, file_digests, without_ray
from tests.end_to_end.sources import make_source
from tests.failing_disk import Fault, failing
from tools.soak.corruption import (
    METHODS,
    Results,
    check_edits,
    check_output,
    check_run_dir,
    one_of_each,
    output_kind,
    stopped_job,
)
from tools.soak.damage import DAMAGES, EDITS, copy_job, damage

LAYERS = 3  # of the fixture `llama`


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Job:
    """A finished job whose copies stand where it ran."""
    folder = tmp_path_factory.mktemp("whole")
    source = factories.make_model(folder / "source", num_hidden_layers=2)
    with without_ray():
        made = stopped_job(Job(folder / "job", source, text, METHODS["lestd"]), "")
    assert made is not None
    return made


@pytest.fixture(scope="module")
def expected(finished_job: Job) -> dict[str, str]:
    return file_digests(finished_job.output)


@pytest.mark.usefixtures("inline")
def test_run_dir(tmp_path: Path, text: Path) -> None:
    """One damage for each kind of file, in turn."""
    source, before = factories.make_model(tmp_path / "source", num_hidden_layers=2), "layer/00001"
    small = {"calibration.samples": 4, "calibration.shards": 2, "calibration.sequence_length": 12}
    small |= {"statistics.keep": True}
    job = Job(tmp_path / "job", source, text, {**METHODS["flat_llm"], **small}).write()
    assert job.run().code == 0
    expected = file_digests(job.output)
    shutil.rmtree(job.root)
    stopped = stopped_job(job, before)
    assert stopped is not None
    kinds = one_of_each(stopped.run_dir)
    assert len(kinds) >= 18, kinds
    results = Results()
    ways = ["middle byte", "cut to half", "deleted", "zeros"]
    for number, kind in enumerate(kinds):
        way = "middle byte" if kind.startswith("ledger") else ways[number % len(ways)]  # entries that lack are no fault
        check_run_dir(stopped, expected, results, before, [way], only=kind)
    assert not results.faults
    told = {kind for (kind, _), found in results.table.items() if set(found) - {"no matter"}}
    assert told >= {"statistics: chunk", "tokens: chunk", "ledger: dense", "fingerprint.json"}, told


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_output(finished_job: Job, expected: dict[str, str]) -> None:
    """Every kind of file, every tensor of a form: `verify` names it, and `run` puts it right where it can see it."""
    results = Results()
    assert len({output_kind(name) for name in expected}) >= 8, expected
    check_output(finished_job, expected, results, "finished", ["deleted"])
    assert not results.faults
    assert len(results.table) == len({output_kind(name) for name in expected}) + 1


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_edits_that_fit(finished_job: Job) -> None:
    results = Results()
    check_edits(finished_job, results, "finished")
    assert not results.faults
    assert len(results.edits) > 20
    assert {name for name, *_ in results.edits} <= set(EDITS)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("how", ["middle byte", "deleted"])
def test_damaged_beyond_the_staged_layer(how: str, finished_job: Job, expected: dict[str, str]) -> None:
    """The staged layer has gone the way of the shard: `run` says so and computes it again."""
    copied = copy_job(finished_job, finished_job.root.with_name("job"))
    staged = sorted(copied.run_dir.glob("staged/*"))[1]
    assert damage(staged, DAMAGES[how])
    assert damage(copied.output / "model-00002-of-00005.safetensors", DAMAGES["deleted"])
    ended = copied.run()
    assert (ended.code, f"repairing: {staged}: " in ended.err) == (0, True), ended.err
    assert file_digests(copied.output) == expected
    shutil.rmtree(copied.root)


@pytest.mark.usefixtures("inline")
def test_no_checkpoint_at_all(tmp_path: Path, llama: Path, finished_job: Job) -> None:
    for path in (tmp_path, llama, tmp_path / "nowhere"):
        ended = command("verify", str(path))
        assert (ended.code, "compression.json: missing" in ended.err) == (2, True), ended
    newer = copy_job(finished_job, tmp_path / "newer")
    path = newer.output / "compression.json"
    content = {**json.loads(path.read_bytes()), "version": 2}
    path.unlink()
    path.write_text(json.dumps(content))
    ended = command("verify", str(newer.output))
    assert ended.code in (1, 2)
    assert "compression.json" in ended.out + ended.err


@pytest.mark.usefixtures("inline")
def test_a_missing_record_is_a_fault_of_the_checkpoint(finished_job: Job) -> None:
    """The modelling code says that it is one; a folder without both is wrong input."""
    copied = copy_job(finished_job, finished_job.root.with_name("without-record"))
    (copied.output / "compression.json").unlink()
    ended = command("verify", str(copied.output))
    assert (ended.code, "FAULT  contract" in ended.out) == (1, True)
    assert "compression.json: missing" in ended.out


@pytest.mark.usefixtures("inline")
def test_another_model_as_the_source_is_said_in_one_line(tmp_path: Path, finished_job: Job) -> None:
    """Nothing is compared with it; the other checks pass. A changed config of the same sizes is no other model."""
    other = make_source(tmp_path / "other", "llama", layers=3, vocab_size=96)
    ended = command("verify", str(finished_job.output), "--source", str(other), "--json")
    assert ended.code == 1
    findings = json.loads(ended.out)["findings"]
    faults = {finding["check"]: finding["faults"] for finding in findings if finding["faults"]}
    sizes = json.loads((finished_job.source / "config.json").read_text())
    assert faults == {
        "source": [
            f"{other}: another model (num_hidden_layers is 3, not 2; vocab_size is 96, not {sizes['vocab_size']}); "
            f"give the one that the checkpoint was made from, {finished_job.source}"
        ]
    }
    assert [finding["check"] for finding in findings].index("source") == 1
    changed = shutil.copytree(finished_job.source, tmp_path / "changed")
    edit_json(changed / "config.json", rms_norm_eps=0.25)
    ended = command("verify", str(finished_job.output), "--source", str(changed))
    assert (ended.code, "config.json: not the file that" in ended.out, "another model" in ended.out) == (1, True, False)


@pytest.mark.usefixtures("inline")
def test_tokens_are_told_of(tmp_path: Path, llama: Path, text: Path) -> None:
    job = Job(tmp_path / "job", llama, text, METHODS["flat_llm"]).write()
    stopped = stopped_job(job, "layer/00001")
    assert stopped is not None
    chunk = next(stopped.run_dir.glob("activations.zarr/tokens/*/c.*"))
    damage(chunk, DAMAGES["cut by one"])
    stopped.root.rename(job.root)
    ended = job.run()
    assert ended.code == 0, ended.err
    assert f"{chunk.name}: stored data is damaged" in ended.err
    assert "done again: tokens" in ended.err
    (log,) = [path.read_text() for path in (job.run_dir / "logs").glob("*.log") if "done again" in path.read_text()]
    assert "taking over the lock" not in log or "is dead" in log


INDEX = "model.safetensors.index.json"

# Where in a job (a part of the path), which of the operations there, what the disk says.
PLACES = [
    ("run/ledger", 1, errno.ENOSPC),
    ("ledger/dense.00001", 2, errno.EROFS),
    ("activations.zarr/dense", 3, errno.ENOSPC),
    ("activations.zarr/tokens", 4, errno.EIO),
    ("statistics.zarr", 9, errno.EDQUOT),
    ("statistics.zarr/layer-00001", 5, errno.ESTALE),
    ("staged/layer-00001", 2, errno.ENOSPC),
    ("staged/layer-00002", 1, errno.EACCES),
    ("output/model-00002", 1, errno.ENOSPC),
    ("output/config.json", 2, errno.EROFS),
    ("output/compression.json", 2, errno.ENOSPC),
    (f"output/{INDEX}", 1, errno.EIO),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> dict[str, str]:
    """The output of a job whose disk works."""
    made = Job(tmp_path_factory.mktemp("whole"), llama, text, {"statistics.keep": True}).write()
    with without_ray():
        assert made.run().code == 0
    return file_digests(made.output)


def play(job: Job, fault: Fault) -> Ended:
    with failing(fault):
        return job.run()


def check_message(ended: Ended, fault: Fault) -> None:
    assert ended.code in (1, 2), ended.err
    assert fault.code is not None
    message = ended.err[max(ended.err.rfind("failed: "), ended.err.rfind("wrong input: ")) :]
    assert os.strerror(fault.code) in message, ended.err
    assert any(str(folder) in message for folder in fault.folders), message
    assert "Traceback" not in ended.err
    assert "internal error" not in ended.err


@pytest.mark.usefixtures("inline")
@pytest.mark.sample(2)
@pytest.mark.parametrize(("match", "nth", "code"), PLACES)
def test_the_job_goes_on(match: str, nth: int, code: int, job: MakeJob, reference: dict[str, str]) -> None:
    made = job(**{"statistics.keep": True})  # or a walk stores none
    fault = Fault((made.run_dir, made.output), code, nth, match=match)
    ended = play(made, fault)
    assert fault.struck, f"only {fault.seen} operations on {match}"
    check_message(ended, fault)
    assert not (made.output / INDEX).exists()
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@pytest.mark.usefixtures("inline")
def test_log_and_heartbeat_are_not_worth_a_job(
    job: MakeJob, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say how a job fares; when they cannot be written, it fares no worse, and no traceback says so."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    for match in ("/logs/", "lock.json"):
        made = job()
        fault = Fault((made.run_dir,), errno.ENOSPC, nth=6, match=match)
        ended = play(made, fault)
        assert fault.struck
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
        assert "Logging error" not in ended.err
        assert file_digests(made.output) == reference


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_short_and_slow_writes(job: MakeJob, reference: dict[str, str]) -> None:
    made = job()
    slow = Fault((made.run_dir / "ledger", made.output), slow=True)
    assert play(made, slow).code == 0
    assert file_digests(made.output) == reference
    made = job()
    short = Fault((made.run_dir / "ledger",), match="tokens", short=True)
    assert play(made, short).code == 0
    assert short.seen > 300
    assert file_digests(made.output) == reference


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
