"""Healing of a job whose model, run directory and output are in a bucket: the bytes are those of a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manifests.heal
import pipeline.job.healing
import pipeline.job.student_training
from pipeline.healing.training import Trainer
from stores.bucket import Bucket
from stores.disk import Disk
from tests import buckets
from tests.end_to_end.jobs import Job

MakeJob = Callable[..., Job]
HEAL = {"epochs": 8, "learning_rate": 0.003}


@pytest.mark.nightly
def test_a_killed_healing_in_a_bucket_goes_on(
    job: MakeJob, s3_bucket: str, llama: Path, text: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests.heal, "STEPS", 1)
    monkeypatch.setattr(manifests.heal, "STEP_TOKENS", 96)
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    buckets.put_inputs(s3_bucket, llama, text)
    local, remote = job(heal=HEAL), job(heal=HEAL, **buckets.job_places(s3_bucket))
    expected = local.run().json
    step, steps = Trainer._step, list[int]()

    def dying(self: Trainer) -> None:
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", dying)
        assert remote.run().code == 75
    run_dir = Bucket(f"{s3_bucket}/run")
    assert [name.rpartition("/")[2] for name in run_dir.names("healing")] == [".metadata", "__0_0.distcp"]
    run_dir.put_if_absent("student-left/config.json", b"{}")  # as by SIGKILL
    ended: Any = remote.run()
    assert "resuming after step 5 of 16" in ended.err
    assert "score teacher" not in ended.err
    assert ended.json["healed"] == expected["healed"]
    assert buckets.digests(Bucket(f"{s3_bucket}/output")) == buckets.digests(Disk(local.output))
    assert not run_dir.names("healing")
    assert not [folder for folder in run_dir.folders() if folder.startswith("student-")]
    assert [path.name for path in remote.root.iterdir()] == ["manifest.yaml"], "nothing is on this disk"
