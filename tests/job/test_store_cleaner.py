"""Replaced data is dropped while the driver continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import StorageError
from manifests.records import ArrayRecord
from pipeline.job.store_cleaner import StoreCleaner
from stores.background import Background
from stores.run_directory import RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """Empty."""
    return RunDirectory(str(tmp_path / "run"))


def stored(run_dir: RunDirectory, layer: int) -> ArrayRecord:
    """Hidden states that enter a layer."""
    return run_dir.activations.write("dense", layer, 0, torch.ones(1, 2, 3))


def there(run_dir: RunDirectory, record: ArrayRecord) -> bool:
    """Whether anything is left of an array."""
    return bool(run_dir.storage.names(f"activations.zarr/{record.path}"))


def held_back(drop: Callable[..., None], until: threading.Event) -> Callable[..., None]:
    """The same, not before that."""

    def dropped(*records: Any) -> None:
        assert until.wait(30)
        drop(*records)

    return dropped


def test_nobody_waits_for_a_drop_but_who_sweeps(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, before = threading.Event(), stored(run_dir, 1)
    monkeypatch.setattr(run_dir.activations, "drop", held_back(run_dir.activations.drop, go_on))
    with Background() as dropping:
        cleaner = StoreCleaner(run_dir, [], dropping)
        cleaner.retain_activations((before,))
        after = stored(run_dir, 2)
        cleaner.retain_activations((after,))
        assert there(run_dir, before)
        go_on.set()
        cleaner.retain_activations(())  # finds what nobody names, when nothing else is being dropped
        assert not there(run_dir, before)
        assert not there(run_dir, after)


def test_all_is_dropped_at_the_end(run_dir: RunDirectory) -> None:
    always, before = stored(run_dir, 0), stored(run_dir, 1)
    with Background() as dropping:
        cleaner = StoreCleaner(run_dir, [always], dropping)
        cleaner.retain_activations((before,))
        after = stored(run_dir, 2)
        cleaner.retain_activations((after,))
    assert [there(run_dir, record) for record in (always, before, after)] == [True, False, True]


def test_a_drop_that_fails_is_told(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: ArrayRecord) -> None:
        raise StorageError("no disk")

    before = stored(run_dir, 1)
    monkeypatch.setattr(run_dir.activations, "drop", fails)
    dropping = Background()
    cleaner = StoreCleaner(run_dir, [], dropping)
    cleaner.retain_activations((before,))
    cleaner.retain_activations((stored(run_dir, 2),))
    with pytest.raises(StorageError, match="no disk"):
        dropping.finish()
    dropping.close()
