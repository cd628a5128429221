"""Questions as windows: what shares a window, what is run once, and what the table of numbers says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.evaluation import questions as module
from pipeline.evaluation.questions import Question, Window, packed, windows_of
from pipeline.units.questions import QuestionShard

CONTEXT = (1, 2, 3, 4)


def places_of(window: Window) -> dict[int, list[tuple[int, int]]]:
    """Question -> rows and next tokens."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row, token, number in window.places:
        found.setdefault(number, []).append((row, token))
    return found


def test_continuations_share_the_context() -> None:
    asked = [Question(CONTEXT, (5, 6, 7)), Question(CONTEXT, (8, 9)), Question((1, 2), (5,))]
    shared, other = windows_of(asked, 100, branching=True)
    assert (shared.ids, shared.branches) == ([1, 2, 3, 4, 5, 6, 8], [0, 0, 0, 0, 1, 1, 2])
    assert places_of(shared) == {0: [(3, 5), (4, 6), (5, 7)], 1: [(3, 8), (6, 9)]}
    assert (other.ids, other.branched, places_of(other)) == ([1, 2], False, {2: [(1, 5)]})
    apart = windows_of(asked, 100, branching=False)
    assert sorted(window.ids for window in apart) == [[1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8]]
    assert not any(window.branched for window in apart)


@pytest.mark.parametrize("branching", [True, False])
def test_what_is_a_part_of_another_is_run_once(branching: bool) -> None:
    """Choices of one token, such as A and B; a choice that begins like another; a question asked twice."""
    asked = [Question(CONTEXT, (5,)), Question(CONTEXT, (6,)), Question(CONTEXT, (5, 6, 7)), Question(CONTEXT, (5,))]
    (window,) = windows_of(asked, 100, branching)
    assert (window.ids, window.branched) == ([1, 2, 3, 4, 5, 6], False)
    assert places_of(window) == {0: [(3, 5)], 1: [(3, 6)], 2: [(3, 5), (4, 6), (5, 7)], 3: [(3, 5)]}


def test_contexts_are_cut_from_the_left() -> None:
    (window,) = windows_of([Question(CONTEXT, (5, 6, 7))], 4, branching=True)
    assert (window.ids, places_of(window)) == ([3, 4, 5, 6], {0: [(1, 5), (2, 6), (3, 7)]})
    (least,) = windows_of([Question(CONTEXT, (5, 6, 7))], 3, branching=True)
    assert (least.ids, places_of(least)) == ([4, 5, 6], {0: [(0, 5), (1, 6), (2, 7)]})


def test_long_continuations_of_a_short_context_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document behind a BOS, or very many continuations: a shared window would cost more than it saves."""
    texts = [Question((0,), tuple(range(number, number + 9))) for number in range(3)]
    assert [len(window.ids) for window in windows_of(texts, 100, branching=True)] == [9, 9, 9]
    monkeypatch.setattr(module, "MOST_BRANCHES", 5)
    many = [Question(CONTEXT, (number, number, 0)) for number in range(5)]
    assert [len(window.ids) for window in windows_of(many, 100, branching=True)] == [8, 8, 6]


def test_the_table_has_every_window_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", 12)
    asked = [Question(tuple(range(number + 1)), (9,) * (1 + number % 3)) for number in range(8)]
    asked += [Question((7, *CONTEXT), (token, 5)) for token in (1, 2, 3)]
    windows = windows_of(asked, 100, branching=True)
    shards, rows = packed(windows)
    assert [shard.branched for shard in shards] == sorted(shard.branched for shard in shards)
    assert sum(shard.windows for shard in shards) == len(windows)
    assert sum(shard.places for shard in shards) == sum(len(question.continuation) for question in asked)
    found = [window for shard in shards for window in read(shard, rows)]
    expected = [(window.ids, window.branches if window.branched else None, sorted(window.places)) for window in windows]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert len(shards) > 2, "the longest of these would be padded to twice the shortest"


def read(shard: QuestionShard, rows: torch.Tensor) -> list[Any]:
    """Return the windows of a shard without their padding."""
    numbers = rows.flatten()[shard.first : shard.first + shard.numbers].tolist()
    ids = [numbers[start : start + shard.length] for start in range(0, shard.tokens, shard.length)]
    behind = numbers[shard.tokens : 2 * shard.tokens]
    branches = [behind[start : start + shard.length] for start in range(0, shard.tokens, shard.length)]
    flat = numbers[-4 * shard.places :]
    places = [flat[start : start + 4] for start in range(0, len(flat), 4)]
    windows = []
    for index in range(shard.windows):
        own = sorted(tuple(place[1:]) for place in places if place[0] == index)
        length = max(row for row, _, _ in own) + 1
        windows.append((ids[index][:length], branches[index][:length] if shard.branched else None, own))
    return windows
