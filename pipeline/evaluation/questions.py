"""Packs questions, each a context and a continuation, into windows that the workers run.

Continuations of one context share a window, so that the context is computed once. Windows are sorted by length, and
those of a shard padded on the right to the longest of them, which no causal model notices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.units.questions import ROW_WIDTH, Answers, QuestionShard

SHARDS = 64  # about
LEAST_TOKENS = 8192  # of a shard, about
PADDED = 8  # the shortest window of a shard lacks at most this part of its length, if the shard has enough tokens
SHARED = 4  # a context shares its window if it has at least this part of the tokens of a continuation
MOST_BRANCHES = 1024  # tokens of the continuations in one window, about

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


@dataclass
class Window:
    """Tokens that are run as one sequence, or as a context with several continuations.

    Attributes:
        branches: of each token: 0, or the number of its continuation.
        places: row, next token and question of each token that is scored.
    """

    ids: list[int]
    branches: list[int]
    context: int
    starts: dict[Ids, int] = field(default_factory=dict)  # of each continuation without its last token
    places: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def branched(self) -> bool:
        """True if it has several continuations."""
        return self.branches[-1] > 1

    def has_room(self, stem: Ids) -> bool:
        """True if one more continuation should share the context."""
        held = len(self.ids) - self.context
        return SHARED * self.context >= len(stem) and held + len(stem) <= max(MOST_BRANCHES, self.context)

    def add(self, stem: Ids) -> None:
        """Add a continuation without its last token."""
        self.starts[stem] = len(self.ids)
        self.branches += [self.branches[-1] + 1] * len(stem)
        self.ids += stem

    def start_of(self, stem: Ids) -> int | None:
        """Return the row where a continuation begins; None if the window lacks it."""
        if stem in self.starts:
            return self.starts[stem]
        return next((start for held, start in self.starts.items() if held[: len(stem)] == stem), None)

    def ask(self, number: int, question: Question, start: int) -> None:
        """Add the places of a question, whose continuation begins at row `start`."""
        rows = [self.context - 1, *range(start, start + len(question.continuation) - 1)]
        self.places += [(row, token, number) for row, token in zip(rows, question.continuation, strict=True)]


def windows_of(questions: Sequence[Question], most: int, branching: bool) -> list[Window]:
    """Return the windows of all questions. Equal tokens are run once.

    Args:
        most: the largest number of tokens that the model reads as one sequence.
        branching: continuations of one context may share a window.
    """
    windows: list[Window] = []
    by_context: defaultdict[Ids, list[tuple[int, Question]]] = defaultdict(list)
    for number, whole in enumerate(questions):
        question = whole.cut(most)
        by_context[question.context].append((number, question))
    for context, group in by_context.items():
        held: dict[Ids, Window] = {}
        current: Window | None = None
        for number, question in sorted(group, key=lambda one: -len(one[1].continuation)):  # the longest holds others
            stem = question.continuation[:-1]
            window = held.get(stem) or (current if current and current.start_of(stem) is not None else None)
            if window is None:
                if current is None or not branching or not current.has_room(stem):
                    current = Window([*context], [0] * len(context), len(context))
                    windows.append(current)
                current.add(stem)
                window = held[stem] = current
            start = window.start_of(stem)
            assert start is not None
            window.ask(number, question, start)
    return windows


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
        tables = [_table([window.ids for window in group], length)]
        if group[0].branched:
            tables.append(_table([window.branches for window in group], length))
        tables.append(np.asarray(places, dtype=np.int32))
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


def _table(lists: Sequence[Sequence[int]], length: int) -> NDArray[np.int32]:
    table = np.zeros((len(lists), length), dtype=np.int32)
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
