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


def test_what_begins_alike_is_run_once() -> None:
    """A context with two continuations, of which a third begins like the first, and a shorter context."""
    continuations = (5, 6, 7), (8, 9), (5, 7, 0)
    asked = [*(Question(CONTEXT, continuation) for continuation in continuations), Question((1, 2), (5,))]
    (shared,) = windows_of(asked, 100, branching=True)
    assert shared.ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shared.ends == [8, 8, 8, 8, 7, 6, 7, 8]
    assert places_of(shared) == {
        0: [(3, 5), (4, 6), (5, 7)],
        1: [(3, 8), (7, 9)],
        2: [(3, 5), (4, 7), (6, 0)],
        3: [(1, 5)],
    }
    apart = windows_of(asked, 100, branching=False)
    assert [window.ids for window in apart] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 8]]
    assert not any(window.branched for window in apart)
    assert places_of(apart[0]) == {0: [(3, 5), (4, 6), (5, 7)], 3: [(1, 5)]}


def test_questions_behind_the_same_examples_share_them() -> None:
    examples = tuple(range(200))
    asked = [Question((*examples, 900 + number, 7), (token, 8)) for number in range(6) for token in (1, 2)]
    windows = windows_of(asked, 1000, branching=True)
    assert [len(window.ids) for window in windows] == [200 + 6 * 4]


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


def test_what_shares_little_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents behind a BOS, or very many continuations: a shared window would cost more than it saves."""
    texts = [Question((0,), tuple(range(number, number + 30))) for number in range(3)]
    assert [len(window.ids) for window in windows_of(texts, 100, branching=True)] == [30, 30, 30]
    monkeypatch.setattr(module, "MOST_APART", 5)
    many = [Question(CONTEXT, (number, number, 0)) for number in range(5)]
    assert [len(window.ids) for window in windows_of(many, 100, branching=True)] == [8, 8, 6]


def test_the_table_has_every_window_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", 12)
    asked = [Question(tuple(range(number, 2 * number + 1)), (9,) * (1 + number % 3)) for number in range(8)]
    asked += [Question((7, *CONTEXT), (token, 5)) for token in (1, 2, 3)]
    windows = windows_of(asked, 100, branching=True)
    shards, rows = packed(windows)
    assert [shard.branched for shard in shards] == sorted(shard.branched for shard in shards)
    assert sum(shard.windows for shard in shards) == len(windows)
    assert sum(shard.places for shard in shards) == sum(len(question.continuation) for question in asked)
    found = [window for shard in shards for window in read(shard, rows)]
    expected = [(window.ids, window.ends, sorted(window.places)) for window in windows]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert len(shards) > 2, "the longest of these would be padded to twice the shortest"


def read(shard: QuestionShard, rows: torch.Tensor) -> list[Any]:
    """Return the windows of a shard without their padding."""
    numbers = rows.flatten()[shard.first : shard.first + shard.numbers].tolist()
    ids = [numbers[start : start + shard.length] for start in range(0, shard.tokens, shard.length)]
    behind = numbers[shard.tokens : 2 * shard.tokens]
    ends = [behind[start : start + shard.length] for start in range(0, shard.tokens, shard.length)]
    flat = numbers[-4 * shard.places :]
    places = [flat[start : start + 4] for start in range(0, len(flat), 4)]
    windows = []
    for index in range(shard.windows):
        own = sorted(tuple(place[1:]) for place in places if place[0] == index)
        length = ends[index][0]
        assert ends[index][length:] == [shard.length] * (shard.length - length)
        windows.append((ids[index][:length], ends[index][:length], own))
    return windows
