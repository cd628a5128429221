"""Each kind of file of a job damaged once; all kinds, damages and methods are in `python -m tools.soak.corruption`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import factories
from tests.end_to_end.jobs import Job, command, file_digests, without_ray
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
pytestmark = pytest.mark.usefixtures("inline")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Job:
    """A finished job whose copies stand where it ran."""
    folder = tmp_path_factory.mktemp("whole")
    source = factories.make_model(folder / "source", num_hidden_layers=2)
    with without_ray():
        made = stopped_job(Job(folder / "job", source, text, METHODS["lestd"]), "")
    assert made is not None
    return made


@pytest.fixture(scope="module")
def expected(whole: Job) -> dict[str, str]:
    return file_digests(whole.output)


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


@pytest.mark.nightly
def test_output(whole: Job, expected: dict[str, str]) -> None:
    """Every kind of file, every tensor of a form: `verify` names it, and `run` puts it right where it can see it."""
    results = Results()
    assert len({output_kind(name) for name in expected}) >= 8, expected
    check_output(whole, expected, results, "finished", ["deleted"])
    assert not results.faults
    assert len(results.table) == len({output_kind(name) for name in expected}) + 1


@pytest.mark.nightly
def test_edits_that_fit(whole: Job) -> None:
    results = Results()
    check_edits(whole, results, "finished")
    assert not results.faults
    assert len(results.edits) > 20
    assert {name for name, *_ in results.edits} <= set(EDITS)


@pytest.mark.parametrize("how", ["middle byte", "deleted"])
def test_damaged_beyond_the_staged_layer(how: str, whole: Job, expected: dict[str, str]) -> None:
    """The staged layer has gone the way of the shard: `run` says so and computes it again."""
    copied = copy_job(whole, whole.root.with_name("job"))
    staged = sorted(copied.run_dir.glob("staged/*"))[1]
    assert damage(staged, DAMAGES[how])
    assert damage(copied.output / "model-00002-of-00005.safetensors", DAMAGES["deleted"])
    ended = copied.run()
    assert (ended.code, f"repairing: {staged}: " in ended.err) == (0, True), ended.err
    assert file_digests(copied.output) == expected
    shutil.rmtree(copied.root)


def test_no_checkpoint_at_all(tmp_path: Path, llama: Path, whole: Job) -> None:
    for path in (tmp_path, llama, tmp_path / "nowhere"):
        ended = command("verify", str(path))
        assert (ended.code, "compression.json: missing" in ended.err) == (2, True), ended
    newer = copy_job(whole, tmp_path / "newer")
    path = newer.output / "compression.json"
    content = {**json.loads(path.read_bytes()), "version": 2}
    path.unlink()
    path.write_text(json.dumps(content))
    ended = command("verify", str(newer.output))
    assert ended.code in (1, 2)
    assert "compression.json" in ended.out + ended.err


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
