"""Redirects the folder into which transformers copies the code of checkpoints."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty folder for the code that transformers copies from checkpoints.

    transformers imports from there as the package `transformers_modules`, which once imported finds its parts only
    in the folder of the first test that used it.
    """

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    place = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place))
    monkeypatch.setattr("sys.path", list(sys.path))  # to which transformers appends the folder
    forget()
    yield place
    forget()
