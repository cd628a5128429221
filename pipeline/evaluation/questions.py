"""Packs questions, each a context and a continuation, into windows that the workers run.

Questions whose tokens begin alike share a window: common tokens are run once, and different ones stand side by side.
Windows are sorted by length, and those of a shard are padded on the right to its longest one. A causal model does not
see padding on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.units.questions import ROW_WIDTH, Answers, QuestionShard

SHARDS = 64  # about
LEAST_TOKENS = 8192  # of a shard, about
PADDED = 8  # the shortest window of a shard lacks at most this part of its length, if the shard has enough tokens
ATTENDED = 512  # tokens that a token attends to in the time of its other products, at least
MOST_APART = 1024  # tokens of a window that a question in it does not share, about

Ids = tuple[int, ...]
Answered = list[tuple[float, bool]]  # by question: its log-likelihood, and whether its tokens are the likeliest


@dataclass(frozen=True)
class Question:
    """The tokens of a continuation that are scored, and those of the context before them, which are not."""

    context: Ids
    continuation: Ids

    def cut(self, most: int) -> Question:
        """Return the question whose tokens but the last are at most `most`, without first tokens of the context."""
        room = most + 1 - len(self.continuation)
        return self if len(self.context) <= room else Question(self.context[-room:], self.continuation)

    @property
    def ids(self) -> Ids:
        """The tokens that the model reads: all but the last one."""
        return self.context + self.continuation[:-1]


@dataclass
class Window:
    """Tokens that are run as one sequence, or as a tree of sequences that begin alike, depth first.

    Attributes:
        ends: for each token, one past the last row that sees it: rows behind it up to there continue its sequence.
        path: the rows of the sequence that was added last.
        places: row, next token and question of each token that is scored.
    """

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def branched(self) -> bool:
        """True if it holds more than one sequence."""
        return len(self.path) < len(self.ids)

    def takes(self, own: int, shared: int, branching: bool) -> bool:
        """Return True if a sequence should join the window.

        `own`: the tokens that it adds; `shared`: those at its beginning that it has in common with the last one. It
        saves the products of these, and costs attention between its own tokens and those that it does not share.
        """
        if shared == len(self.path) and not self.branched:
            return True  # it continues the only sequence
        apart = len(self.ids) - shared
        pays = 2 * own * apart <= shared * (ATTENDED + shared)
        return branching and pays and own + apart <= max(MOST_APART, shared)

    def add(self, ids: Ids, shared: int) -> None:
        """Add a sequence. `shared`: the tokens at its beginning that it has in common with the last one."""
        first = len(self.ids)
        self.ids += ids[shared:]
        self.ends += [0] * (len(self.ids) - first)
        self.path[shared:] = range(first, len(self.ids))
        for row in self.path:
            self.ends[row] = len(self.ids)

    def ask(self, number: int, question: Question) -> None:
        """Add the places of a question, whose sequence was added last."""
        rows = self.path[len(question.context) - 1 :]
        self.places += [(row, token, number) for row, token in zip(rows, question.continuation, strict=True)]


def windows_of(questions: Sequence[Question], most: int, branching: bool) -> list[Window]:
    """Return the windows of all questions. Equal tokens are run once.

    Args:
        most: the largest number of tokens that the model reads as one sequence.
        branching: different sequences may share a window.
    """
    windows: list[Window] = []
    last: Ids = ()
    cut = [question.cut(most) for question in questions]
    for ids, number in sorted((question.ids, number) for number, question in enumerate(cut)):
        shared = _alike(last, ids)
        if not windows or not windows[-1].takes(len(ids) - shared, shared, branching):
            windows.append(Window())
            shared = 0
        windows[-1].add(ids, shared)
        windows[-1].ask(number, cut[number])
        last = ids
    return windows


def _alike(one: Ids, other: Ids) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def packed(windows: Sequence[Window]) -> tuple[list[QuestionShard], torch.Tensor]:
    """Return the shards of all windows, and their numbers (rows, ROW_WIDTH)."""
    order = sorted(windows, key=lambda window: (window.branched, -len(window.ids)))
    enough = max(LEAST_TOKENS, sum(len(window.ids) for window in windows) // SHARDS)
    shards: list[QuestionShard] = []
    parts: list[NDArray[np.int32]] = []
    for group in _groups(order, enough):
        length = len(group[0].ids)
        places = [(index, *place) for index, window in enumerate(group) for place in window.places]
        first = sum(part.size for part in parts)
        tables = [
            _table([window.ids for window in group], length, 0),
            _table([window.ends for window in group], length, length),  # padding sees padding
            np.asarray(places, dtype=np.int32),
        ]
        shards.append(QuestionShard(first, len(group), length, len(places), group[0].branched))
        parts += [table.ravel() for table in tables]
    flat = np.concatenate(parts)
    rows = np.zeros((-(-flat.size // ROW_WIDTH), ROW_WIDTH), dtype=np.int32)
    rows.ravel()[: flat.size] = flat
    return shards, torch.from_numpy(rows)


def _groups(order: Sequence[Window], enough: int) -> list[list[Window]]:
    """Cut sorted windows into shards."""
    groups: list[list[Window]] = []
    for window in order:
        last = groups[-1] if groups else None
        if last is None or last[0].branched != window.branched or _is_full(last, window, enough):
            groups.append(last := [])
        last.append(window)
    return groups


def _is_full(group: Sequence[Window], window: Window, enough: int) -> bool:
    """True if a window should begin a new shard."""
    longest = len(group[0].ids)
    tokens = longest * len(group)
    too_short = len(window.ids) * PADDED < longest * (PADDED - 1)
    return tokens >= enough or (too_short and tokens >= LEAST_TOKENS // 2)


def _table(lists: Sequence[Sequence[int]], length: int, padding: int) -> NDArray[np.int32]:
    table = np.full((len(lists), length), padding, dtype=np.int32)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    return table


def in_order(answers: Sequence[Answers], count: int) -> Answered:
    """Return the answers of all shards in the order of the questions. `count`: their number."""
    answered: Answered = [(0.0, False)] * count
    for shard in answers:
        for number, log, greedy in zip(shard.questions, shard.logs, shard.greedy, strict=True):
            answered[number] = log, greedy
    return answered
