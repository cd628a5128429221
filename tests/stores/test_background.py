"""Calls beside the caller: in order, bounded, and no failure is lost."""

from __future__ import annotations

import threading

import pytest

from stores.background import Background


def test_calls_are_made_in_order_in_another_thread() -> None:
    made: list[tuple[int, bool]] = []
    main = threading.main_thread()
    with Background() as beside:
        for number in range(100):
            beside.submit(lambda number: made.append((number, threading.current_thread() is main)), number)
    assert made == [(number, False) for number in range(100)]


def test_the_caller_is_never_far_ahead() -> None:
    """With the thread held up, the third call more than it may hold waits."""
    held, begun = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        held.wait(30)

    beside = Background(ahead=2)
    beside.submit(first)
    assert begun.wait(30)
    beside.submit(lambda: None)
    waiting = threading.Thread(target=beside.submit, args=(lambda: None,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    held.set()
    waiting.join(30)
    assert not waiting.is_alive()
    beside.finish()
    beside.close()


def failing() -> None:
    raise OSError("no room")


def test_a_failure_is_told_at_the_end_or_before() -> None:
    with pytest.raises(OSError, match="no room"), Background() as beside:
        beside.submit(failing)
    made: list[int] = []
    with Background(ahead=1) as beside:
        beside.submit(failing)
        with pytest.raises(OSError, match="no room"):
            beside.submit(made.append, 1)


def test_the_callers_own_error_comes_first_and_drops_the_rest() -> None:
    held, made = threading.Event(), list[int]()

    def both() -> None:
        with Background(ahead=9) as beside:
            beside.submit(lambda: (held.wait(30), failing()))
            beside.submit(made.append, 1)
            threading.Timer(0.1, held.set).start()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        both()
    assert made == []
