"""The files of a checkpoint's directory."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.listing import listed_files
from stores.model_files import FOLDERS
from stores.storage import open_storage


def test_companions_are_listed_by_path_and_other_folders_by_name(tmp_path: Path) -> None:
    companions = sorted(FOLDERS)[0]
    for name in ("model.safetensors", ".lock", f"{companions}/one.json", f"{companions}/.half", "logs/a/b.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert listed_files(open_storage(str(tmp_path))) == sorted(["model.safetensors", f"{companions}/one.json", "logs"])


def test_an_empty_folder_of_companions_is_left_out(tmp_path: Path) -> None:
    (tmp_path / sorted(FOLDERS)[0]).mkdir()
    assert listed_files(open_storage(str(tmp_path))) == []
