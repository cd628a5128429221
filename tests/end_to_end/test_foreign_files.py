"""Files of others in OUTPUT and RUN_DIR are refused by name and stay unchanged; Lamina recognises its own files."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manifests.errors import InputError
from pipeline.checkpoint.output_directory import LOCK_FILE, claim_output
from stores.durable import partial_path
from stores.lock import RunLock
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Ended, Job, MakeJob, file_digests
from tests.end_to_end.test_wrong_input import refuse_writes_below

pytestmark = pytest.mark.usefixtures("inline")

NOBODY = 65534


@pytest.fixture
def reference(finished_once: Job) -> dict[str, str]:
    return file_digests(finished_once.output)


@pytest.fixture
def finished(finished_once: Job) -> Iterator[Job]:
    """Yield a finished job, and restore it after the test."""
    kept = finished_once.root.with_name(f"{finished_once.root.name}-kept")
    shutil.copytree(finished_once.root, kept)
    yield finished_once
    shutil.rmtree(finished_once.root)
    kept.rename(finished_once.root)


@pytest.fixture
def made(job: MakeJob, finished_once: Job) -> Job:
    return job(**finished_once.changes)


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("options", [[], ["--fresh"]])
@pytest.mark.parametrize(
    "names",
    [
        ["README.md"],
        ["config.json", "pytorch_model.bin"],
        ["tokenizer.json", "tokenizer_config.json"],
        ["model-00001-of-00002.safetensors"],
        ["compression.json"],
        ["notes.txt", "checkpoints/step.pt"],
    ],
)
def test_output_of_others(names: list[str], options: list[str], made: Job) -> None:
    for name in names:
        (made.output / name).parent.mkdir(parents=True, exist_ok=True)
        (made.output / name).write_text("theirs")
    before = everything(made.output)
    refused(made.run(*options), str(made.output), *(name.partition("/")[0] for name in names), "move them away")
    assert everything(made.output) == before


@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_a_dense_model_in_output(options: list[str], made: Job, llama: Path) -> None:
    shutil.copytree(llama, made.output)
    before = everything(made.output)
    refused(made.run(*options), "config.json", "did not write")
    assert everything(made.output) == before


def test_hidden_files_are_none_of_a_model(made: Job, reference: dict[str, str]) -> None:
    """Hidden files, such as those of a mounted volume or of git, stay and do not prevent a job."""
    for name in (".git/HEAD", ".DS_Store", "lost+found/x"):
        (made.output / name).parent.mkdir(parents=True, exist_ok=True)
        (made.output / name).write_text("theirs")
    strangers = partial_path(made.output / ".git" / "index")
    strangers.write_text("a live writer's: not below OUTPUT itself")
    partial_path(made.output / "model-00001").write_text("of a killed run")
    before = everything(made.output / ".git")
    assert made.run().code == 0
    assert everything(made.output / ".git") == before
    left = {path.name for path in made.output.iterdir()} - reference.keys()
    assert left == {".git", ".DS_Store", "lost+found"}


def test_the_checkpoint_of_another_job(finished: Job, made: Job, reference: dict[str, str]) -> None:
    """Replaced with --fresh only, and only what its record names."""
    other = ["--set", f"output={finished.output}"]
    refused(made.run(*other), "a checkpoint of another job", "--fresh")
    (finished.output / "eval.json").write_text("theirs")
    refused(made.run(*other, "--fresh"), "eval.json")
    (finished.output / "eval.json").unlink()
    assert file_digests(finished.output) == reference
    replaced = made.run(*other, "--fresh", "--set", "budget.keep=0.9", "--set", "methods.0.layers=last:1")
    assert replaced.code == 0, replaced.err
    assert not set(file_digests(finished.output)) & {name for name in reference if name.startswith("model-00001-of-")}


def test_a_finished_job_does_not_mind(finished: Job) -> None:
    """A finished job ignores foreign files until it must write something."""
    (finished.output / "eval.json").write_text("theirs")
    assert finished.run().json["already_finished"] is True
    (finished.output / "config.json").write_text("{}")
    refused(finished.run(), "eval.json")
    (finished.output / "eval.json").unlink()
    assert finished.run().code == 0


def test_ranks_are_not_undone_for_nothing(job: MakeJob) -> None:
    """Refused before the layers that are there are taken back."""
    made = job(**{"calibration.propagate": "dense"})
    assert made.run().code == 0
    (made.output / "eval.json").write_text("theirs")
    refused(made.run("--set", "budget.keep=0.8"), "eval.json")
    assert made.run().json["already_finished"] is True


def test_another_model_where_output_was(finished: Job, llama: Path) -> None:
    """The ledger knows the names, but these are no files of the job."""
    shutil.rmtree(finished.output)
    shutil.copytree(llama, finished.output)
    (finished.output / "README.md").write_text("theirs")
    before = everything(finished.output)
    refused(finished.run(), "README.md", "config.json")
    assert everything(finished.output) == before


@pytest.mark.parametrize("match", ["model-00002", "config.json", "compression.json"])
def test_an_interrupted_assembly_goes_on(match: str, made: Job, reference: dict[str, str]) -> None:
    killed = Child("run", [str(made.manifest)], made.root / "log", Hook("file", match=f"output/{match}", after=True))
    assert killed.end() < 0
    assert [*made.output.glob("model-00001-of-*.safetensors")]
    (made.output / "notes.txt").write_text("theirs")
    refused(made.run(), "notes.txt")
    (made.output / "notes.txt").unlink()
    assert made.run().code == 0
    assert file_digests(made.output) == reference


def test_an_interrupted_fresh_start_goes_on(finished: Job, reference: dict[str, str]) -> None:
    """Without --fresh: the old checkpoint is the job's to replace since it was said once."""
    change = ["--set", "seed=4"]
    log, hook = finished.root / "log", Hook("commit", match="layer/00001")
    assert Child("run", [str(finished.manifest), *change, "--fresh"], log, hook).end() < 0
    assert finished.run(*change).code == 0
    assert file_digests(finished.output).keys() == reference.keys()


# -- RUN_DIR -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--fresh"]])
@pytest.mark.parametrize(
    "name", ["manifest.yaml", "fingerprint.json", "report.html", "staged/layer-1.pt", "statistics.zarr/zarr.json"]
)
def test_run_dir_of_others(name: str, options: list[str], made: Job) -> None:
    (made.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (made.run_dir / name).write_text("{}")
    refused(made.run(*options), str(made.run_dir), name, "move them away")
    assert everything(made.run_dir) == {name: b"{}"}
    assert not made.output.exists()


def test_what_is_not_in_the_way_stays(made: Job, reference: dict[str, str]) -> None:
    """Notes, logs of a scheduler, and the half file of another job's live writer in a run directory below."""
    below = partial_path(made.run_dir / "sweep" / "fingerprint.json")
    for path in (made.run_dir / "slurm-17.out", below):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    assert made.run().code == 0
    (made.run_dir / "staged" / "notes.txt").write_text("theirs")
    assert made.run("--fresh").code == 0
    assert file_digests(made.output) == reference
    for path in (made.run_dir / "slurm-17.out", below, made.run_dir / "staged" / "notes.txt"):
        assert path.read_text() == "theirs"


# -- locks and filesystems ---------------------------------------------------------------------------------------------


def test_nothing_is_left_beside_output_or_in_it(made: Job) -> None:
    assert made.run().code == 0
    assert {path.name for path in made.root.iterdir()} == {"manifest.yaml", "output", "run"}
    assert not [path for path in made.output.iterdir() if path.name.startswith(".")]


def test_without_hard_links(made: Job, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    ended = made.run()
    assert ended.code == 0, ended.err
    assert file_digests(made.output) == reference


def test_a_parent_that_is_not_writable(made: Job, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """OUTPUT is writable, as a mounted volume is, and its parent is not."""
    volume = made.root / "volumes" / "volume"
    volume.mkdir(parents=True)
    if os.geteuid() == 0:
        refuse_writes_below(volume.parent, monkeypatch, writable=volume)
    else:
        volume.parent.chmod(0o500)
    ended = made.run("--set", f"output={volume}")
    assert ended.code == 0, ended.err
    assert file_digests(volume) == reference
    assert list(volume.parent.iterdir()) == [volume]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_volume_of_a_user_without_rights_around_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    volume = tmp_path_factory.mktemp("volumes") / "volume"
    volume.mkdir()
    os.chown(volume, NOBODY, NOBODY)
    descriptor = os.open(volume.parent, os.O_RDONLY)  # the folders of pytest are closed to others
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.fchdir(descriptor)
            os.chmod(".", 0o755)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with claim_output(Path("volume")) as lock:
                lock.beat({})
                names = sorted(os.listdir("volume"))
            code = 0 if names == [LOCK_FILE, f"{LOCK_FILE}.json"] and os.listdir("volume") == [] else 2
        except BaseException as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(descriptor)


def test_an_output_that_was_not_there_is_gone_with_the_lock(tmp_path: Path) -> None:
    with claim_output(tmp_path / "out"), pytest.raises(InputError, match="held by"):
        RunLock(tmp_path / "out", LOCK_FILE).acquire()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with claim_output(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []
