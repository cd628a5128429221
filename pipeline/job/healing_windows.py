"""The text of a healing as the training reads it: token ids, and what is stored of the dense model.

Legend: B windows of a micro-batch, S tokens of a window, T scored tokens, D hidden, W bytes of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from manifests.entries import TeacherEntry
from manifests.records import ArrayRecord
from pipeline.inputs.healing_text import HealingTokens
from pipeline.job.context import JobContext
from pipeline.units.scores import Windows
from stores.arrays import ArrayReader

SHARDS = 16  # of the text, in a job without calibration
MICRO_TOKENS = 2048  # about, of a micro-batch


def teacher_windows(job: JobContext, tokens: HealingTokens, stored: ArrayRecord) -> tuple[Windows, int]:
    """Return the windows of the teacher's pass, trained ones first, and the number of shards with these."""
    calibration = job.manifest.calibration
    shards, micro_batch = (calibration.shards, calibration.micro_batch) if calibration else (SHARDS, 1)
    dtype = str(torch.promote_types(job.inputs.dtype, torch.float32)).removeprefix("torch.")
    count = len(tokens.trained)
    trained = Windows.even(count, shards, dtype, micro_batch).ranges
    held_out = Windows.even(len(tokens.held_out), shards, dtype, micro_batch).ranges
    ranges = (*trained, *((count + first, count + end) for first, end in held_out))
    return Windows(ranges, dtype, micro_batch, stored, len(tokens.prefix)), len(trained)


class StoredWindows:
    """Implements `pipeline.healing.training.Windows` from the stores of RUN_DIR."""

    def __init__(self, job: JobContext, tokens: HealingTokens, entry: TeacherEntry) -> None:
        self.token_ids = tokens
        self.unscored = max(1, len(tokens.prefix))
        self.trained, self.length = tokens.trained.shape
        self.held_out = len(tokens.held_out)
        self.micro_batch = max(1, MICRO_TOKENS // self.length)
        store = job.run_dir.activations
        self._rows = _Shards([store.open(record) for record in entry.rows])
        self._outputs = _Shards([store.open(record) for record in entry.outputs])

    @property
    def tokens(self) -> int:
        """The number of tokens in trained windows."""
        return self.trained * self.length

    @property
    def held_out_tokens(self) -> int:
        """The number of tokens in held-out windows."""
        return self.held_out * self.length

    def ids(self, windows: list[int]) -> Tensor:
        """Return token ids (B, S) of trained windows."""
        return self.token_ids.trained[windows]

    def rows(self, windows: list[int]) -> Tensor:
        """Return the teacher's rows (B·T, W) of trained windows."""
        return torch.cat([self._rows.read(window) for window in windows])

    def held_out_ids(self, window: int) -> Tensor:
        """Return token ids (1, S) of a held-out window."""
        return self.token_ids.held_out[window : window + 1]

    def held_out_outputs(self, window: int) -> Tensor:
        """Return the teacher's last hidden states (S, D) of a held-out window."""
        return self._outputs.read(window)


class _Shards:
    """Rows of stored arrays, numbered through all of them."""

    def __init__(self, readers: Sequence[ArrayReader]) -> None:
        self.readers = readers
        self.begins = [sum(reader.shape[0] for reader in readers[:place]) for place in range(len(readers))]

    def read(self, row: int) -> Tensor:
        shard = bisect_right(self.begins, row) - 1
        local = row - self.begins[shard]
        return self.readers[shard].read(local, local + 1)[0]
