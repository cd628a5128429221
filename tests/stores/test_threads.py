"""Results of threads come in order, at most one task per thread runs at a time, and an error ends them."""

from __future__ import annotations

import threading
import time

import pytest

from stores.threads import parallel_imap, parallel_map


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_results_come_in_the_order_of_what_they_are_of(threads: int, count: int) -> None:
    def take(number: int) -> int:
        time.sleep(0.002 * ((count - number) % 3))
        return number * number

    expected = [number * number for number in range(count)]
    assert parallel_map(take, range(count), threads) == expected
    assert list(parallel_imap(take, iter(range(count)), threads)) == expected


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_do_them_at_a_time_and_no_further_ahead(threads: int) -> None:
    together = threading.Barrier(threads)  # passes only if so many are at it at once
    begun: list[int] = []

    def take(number: int) -> int:
        begun.append(number)
        if number < threads:
            together.wait(timeout=20)
        return number

    results = parallel_imap(take, range(20), threads)
    for number in range(20):
        assert next(results) == number
        assert len(begun) <= number + threads


def test_one_thread_is_the_callers_own() -> None:
    here = threading.get_ident()
    for found in (
        parallel_map(lambda _: threading.get_ident(), range(3), 1),
        parallel_imap(lambda _: threading.get_ident(), range(3), 1),
    ):
        assert set(found) == {here}
    assert here not in parallel_map(lambda _: threading.get_ident(), range(3), 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_is_raised_and_what_is_not_begun_never_is(threads: int) -> None:
    begun: list[int] = []

    def take(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    results = parallel_imap(take, range(100), threads)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)
    assert len(begun) <= 3 + threads
    with pytest.raises(ValueError, match="two"):
        parallel_map(take, range(3), threads)


def test_a_caller_who_leaves_waits_for_what_is_begun_alone() -> None:
    begun: list[int] = []
    results = parallel_imap(begun.append, range(100), 2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 4
