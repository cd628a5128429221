"""The sources of calibration samples: shares, choices and counts of tokens, against a loop over tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.methods.text_sources import NO_SOURCES, TextSources

SEQUENCE = 6
THREE = TextSources(("prose", "code", "tables"), (0, 1, 0, 2, 0), SEQUENCE)


def test_shares_are_those_of_the_samples() -> None:
    assert THREE.shares == {"prose": 3 / 5, "code": 1 / 5, "tables": 1 / 5}


def test_some_samples_keep_their_sources() -> None:
    some = THREE.some([3, 1])
    assert (some.names, some.of_samples, some.sequence) == (THREE.names, (2, 1), SEQUENCE)
    assert some.shares == {"prose": 0.0, "code": 0.5, "tables": 0.5}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_marked_tokens_are_counted_by_source(step: int) -> None:
    """Each `step`th calibration token is in the statistic."""
    places = range(0, len(THREE.of_samples) * SEQUENCE, step)
    passed_T = torch.rand(len(places), generator=torch.Generator().manual_seed(step)) < 0.6
    expected = Counter(
        THREE.names[THREE.of_samples[place // SEQUENCE]]
        for place, passed in zip(places, passed_T.tolist(), strict=True)
        if passed
    )
    assert THREE.count(passed_T) == {name: expected[name] for name in THREE.names}


def test_one_source_is_not_counted() -> None:
    marked_T = torch.ones(SEQUENCE, dtype=torch.bool)
    assert TextSources(("prose",), (0,), SEQUENCE).count(marked_T) == NO_SOURCES.count(marked_T) == {}
