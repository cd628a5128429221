"""Relative paths: resolved where the job was submitted, or refused where they would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.loading import load_manifest, parse_manifest
from pipeline.console.paths import resolve_paths

ROOT = Path(__file__).parents[2]


def manifest(**changes: Any) -> Any:
    return parse_manifest(
        {
            "version": 1,
            "model": {"source": "some/model"},
            "output": "out",
            "run_dir": "run",
            "budget": {"keep": 0.5},
            "calibration": {"text": {"files": ["a.txt", "/b.txt"]}, "samples": 4, "shards": 2},
            "methods": [{"method": "flat_llm", "layers": [0, 1]}, {"method": "lorc", "layers": "last:1"}],
            "evaluation": {"perplexity": {"text": {"files": ["c.txt"]}, "window": 8}},
            "heal": {"text": {"files": ["d.txt"]}},
            **changes,
        }
    )


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a job runs that was submitted with --working-dir."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_relative_paths_are_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_paths(manifest(), None) == manifest()


def test_in_a_package_folder_they_are_refused_all_at_once(package_folder: Path) -> None:
    (package_folder / "some" / "model").mkdir(parents=True)
    with pytest.raises(InputError) as refused:
        resolve_paths(manifest(), None)
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["output", "run_dir", "model.source"]
    for line in lines:
        assert str(package_folder) in line
        assert "Write an absolute path" in line
        assert '--base "$PWD"' in line


def test_a_hub_id_and_texts_in_the_package_are_no_such_paths(package_folder: Path) -> None:
    made = manifest(output="/data/out", run_dir="/data/run")
    assert resolve_paths(made, None) == made


def test_a_base_that_is_visible(tmp_path: Path, package_folder: Path) -> None:
    submitted = tmp_path / "submitted"
    (submitted / "some" / "model").mkdir(parents=True)
    settled = resolve_paths(manifest(), submitted)
    assert (settled.output, settled.run_dir) == (f"{submitted}/out", f"{submitted}/run")
    assert settled.model.source == f"{submitted}/some/model"
    assert settled.calibration.text.files == (f"{submitted}/a.txt", "/b.txt")
    assert settled.evaluation.perplexity.text.files == (f"{submitted}/c.txt",)
    assert settled.heal.text.files == (f"{submitted}/d.txt",)
    assert settled.methods == manifest().methods
    assert resolve_paths(manifest(model={"source": "org/name"}), submitted).model.source == "org/name"


def test_a_base_that_is_not_visible(tmp_path: Path, package_folder: Path) -> None:
    with pytest.raises(InputError, match=r"--base .*: no such directory on this machine"):
        resolve_paths(manifest(), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("output", {"output": "ftp://host/out"}),
        ("run_dir", {"run_dir": "gs://bucket/run"}),
        ("model.source", {"model": {"source": "az://bucket/model"}}),
    ],
)
def test_unknown_places_are_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    """No folder named `gs:`."""
    with pytest.raises(InputError, match=rf"{field}: \w+://.*give a directory"):
        resolve_paths(manifest(**changes), None)


@pytest.mark.parametrize("path", sorted((ROOT / "manifests").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_manifests_survive_submission(path: Path, package_folder: Path) -> None:
    """All but the quickstart's, which is of the checkout that it runs in."""
    if path.stem == "quickstart":
        with pytest.raises(InputError, match="is relative"):
            resolve_paths(load_manifest(path), None)
    else:
        resolve_paths(load_manifest(path), None)


def test_letters_that_a_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(path: str) -> bytes:
        return path.encode("ascii")

    monkeypatch.setattr("pipeline.console.paths.os.fsencode", encode)
    with pytest.raises(InputError, match=r"output: 'aus/größe' has letters .*\(ascii\); set LC_ALL=C.UTF-8"):
        resolve_paths(manifest(output="aus/größe"), None)


def test_a_home_that_no_shell_expands_is_refused() -> None:
    with pytest.raises(InputError, match=r"run_dir: ~/run: `~` is not expanded in a manifest; write the whole path"):
        resolve_paths(manifest(run_dir="~/run"), None)
