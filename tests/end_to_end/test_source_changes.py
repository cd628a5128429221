"""The source changes under a run: noticed by the file's name, and never is a checkpoint made of two sources."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import factories
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import Job, file_digests, without_ray

pytestmark = pytest.mark.usefixtures("inline")
Change = Callable[[Path], Path]
POINTS: dict[str, Hook] = {
    "before the first layer": Hook("commit", match="dense/"),
    "between two layers": Hook("commit", match="layer/00001"),
    "before the index": Hook("file", match="compression.json"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as it is before a test."""
    return factories.make_model(tmp_path_factory.mktemp("kept") / "source")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changing") / "source"


@pytest.fixture
def model(kept: Path, place: Path) -> Path:
    """A source of its own, which a test may change."""
    return restored(place, kept)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, kept: Path, place: Path, text: Path) -> dict[str, str]:
    """The output of a run whose source stays as it is."""
    made = Job(tmp_path_factory.mktemp("undisturbed"), restored(place, kept), text).write()
    with without_ray():
        assert made.run().code == 0
    return file_digests(made.output)


def restored(place: Path, kept: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(kept, place))


def in_place(model: Path) -> Path:
    """Other numbers, in a file of the same name and size."""
    path = sorted(model.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) - 64)
        file.write(bytes(byte ^ 1 for byte in content[-64:]))
    return path


def replaced(model: Path) -> Path:
    path = sorted(model.glob("*.safetensors"))[0]
    other = path.with_suffix(".new")
    content = path.read_bytes()
    other.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
    os.replace(other, path)
    return path


def deleted(model: Path) -> Path:
    path = sorted(model.glob("*.safetensors"))[0]
    path.unlink()
    return path


def config(model: Path) -> Path:
    path = model / "config.json"
    path.write_text(path.read_text().replace("1e-06", "1e-05"))
    return path


def tokenizer(model: Path) -> Path:
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    return path


def run_changed(made: Job, hook: Hook, change: Change) -> tuple[int, str, Path]:
    """A run whose source changes at the hook: how it ended, and the file that changed."""
    pause = made.root / "pause"
    hook = Hook(hook.what, hook.nth, hook.match, hook.after, pause=str(pause))
    child = Child("run", [str(made.manifest)], made.root / "log", hook)
    wait_for(pause, child)
    path = change(made.source)
    pause.unlink()
    return child.end(), child.said, path


@pytest.mark.parametrize(
    ("point", "change"),
    [
        ("before the first layer", in_place),
        ("between two layers", replaced),
        ("between two layers", config),
        ("between two layers", tokenizer),
        ("before the index", in_place),
        ("before the index", deleted),
    ],
)
def test_a_change_under_a_run_ends_it(
    point: str, change: Change, undisturbed: dict[str, str], model: Path, kept: Path, text: Path, tmp_path: Path
) -> None:
    made = Job(tmp_path / "job", model, text).write()
    code, said, path = run_changed(made, POINTS[point], change)
    assert (code, path.name in said, "Traceback" in said) == (1, True, False), said
    assert not (made.output / "model.safetensors.index.json").exists()
    restored(model, kept)
    assert made.run().code == 0
    assert file_digests(made.output) == undisturbed


def test_another_source_is_refused_on_resuming(model: Path, text: Path, tmp_path: Path) -> None:
    made = Job(tmp_path / "job", model, text).write()
    _, said, path = run_changed(made, POINTS["between two layers"], in_place)
    ended = made.run()
    assert (ended.code, path.name in ended.err) == (2, True), (said, ended)


def test_times_alone_may_change(model: Path, text: Path, tmp_path: Path) -> None:
    """As by a backup, or a hard link that another job makes."""

    def touched(model: Path) -> Path:
        path = sorted(model.glob("*.safetensors"))[0]
        os.utime(path)
        os.link(path, tmp_path / "link")
        return path

    code, said, _ = run_changed(Job(tmp_path / "job", model, text).write(), POINTS["between two layers"], touched)
    assert code == 0, said
