"""Imported objects are exempt from garbage collection; all other objects are collected as before."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from manifests.importing import quick_imports


class Cycle:
    """Is found by the collector alone."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.slow
def test_what_is_imported_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_for_a_test.py").write_text("CYCLE = []\nCYCLE.append(CYCLE)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    try:
        with quick_imports():
            assert not gc.isenabled()
            with quick_imports():
                import imported_for_a_test  # type: ignore[import-not-found]
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(found is imported_for_a_test.CYCLE for found in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_nothing_new_is_not_set_aside() -> None:
    before, kept = gc.get_freeze_count(), Cycle()
    left = weakref.ref(kept)
    with pytest.raises(ImportError), quick_imports():
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    del kept
    gc.collect()
    assert left() is None
