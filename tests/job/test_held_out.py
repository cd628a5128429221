"""The entry of held-out text, without a job around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import StorageError
from manifests.records import ArrayRecord
from pipeline.driver.ledger_keys import HELD_OUT
from pipeline.driver.scoring import States
from pipeline.job.held_out import _keep
from pipeline.units.scores import Windows

RECORD = ArrayRecord(
    version=1, path=f"activations/tokens/{'0' * 32}", shape=(2, 8), dtype="int32", chunks=(2, 8), symmetric=False,
    metadata_sha256="0" * 64, checksums=("",),
)  # fmt: skip


class VanishedLedger:
    """A ledger whose folder is gone: nothing is entered, and nothing can be."""

    def get(self, key: Any) -> None:
        return None

    def commit(self, key: Any, entry: Any) -> None:
        assert (key, entry.tokens) == (HELD_OUT, RECORD)
        raise StorageError("the folder is gone")


def test_a_run_directory_that_vanishes_while_text_is_scored_is_a_storage_error() -> None:
    windows = Windows.even(2, 1, "float32", 1, RECORD)
    job: Any = SimpleNamespace(ledger=VanishedLedger())
    with pytest.raises(StorageError, match="gone"):
        _keep(job, None, [], windows, States((RECORD,), {}))  # type: ignore[arg-type]
