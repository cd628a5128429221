"""Disks that fail while a job writes: a message that names path and cause, and the same bytes once they work again.

All places one after another: `python -m tools.soak.disks`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.job import heartbeat
from tests.end_to_end.jobs import Ended, Job, file_digests, without_ray
from tests.failing_disk import Fault, failing

pytestmark = pytest.mark.usefixtures("inline")

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
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
