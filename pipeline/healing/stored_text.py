"""The text of a healing as the training reads it: token ids, and what is stored of the dense model.

Legend: B windows of a micro-batch, S tokens of a window, T scored tokens, D hidden, W bytes of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifests.entries import TeacherEntry
from manifests.heal import EVALUATED_TOKENS, MICRO_TOKENS
from stores.activations import ActivationStore
from stores.arrays import ArrayReader


@dataclass(frozen=True)
class TextSizes:
    """The numbers of trained and of held-out windows, the tokens of each, and how many at its beginning are not
    scored."""

    trained: int
    held_out: int
    length: int
    unscored: int

    @property
    def tokens(self) -> int:
        """The number of tokens in trained windows."""
        return self.trained * self.length

    @property
    def evaluated(self) -> list[int]:
        """The held-out windows that are scored again and again: as many as `EVALUATED_TOKENS` fill, evenly spread."""
        count = min(self.held_out, max(1, EVALUATED_TOKENS // self.length))
        return [place * self.held_out // count for place in range(count)]

    @property
    def held_out_tokens(self) -> int:
        """The number of tokens in the windows that are scored."""
        return len(self.evaluated) * self.length

    @property
    def micro_batch(self) -> int:
        """The number of windows that pass the model at a time."""
        return max(1, MICRO_TOKENS // self.length)


class StoredText:
    """The windows and the teacher's rows in RUN_DIR."""

    def __init__(self, sizes: TextSizes, entry: TeacherEntry, store: ActivationStore) -> None:
        self.sizes = sizes
        self._ids = _Shards([store.open(entry.tokens)])
        self._rows = _Shards([store.open(record) for record in entry.rows])
        self._outputs = _Shards([store.open(record) for record in entry.outputs])

    def ids(self, windows: list[int]) -> Tensor:
        """Return token ids (B, S) of trained windows."""
        return torch.stack([self._ids.read(window) for window in windows]).long()

    def rows(self, windows: list[int]) -> Tensor:
        """Return the teacher's rows (B·T, W) of trained windows."""
        return torch.cat([self._rows.read(window) for window in windows])

    def held_out_ids(self, window: int) -> Tensor:
        """Return token ids (1, S) of a held-out window."""
        return self._ids.read(self.sizes.trained + window)[None].long()

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
