"""The windows of a healing: trained and held-out ones, and texts that are too short."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.schema import Manifest
from pipeline.inputs.healing_text import calibration_as_text
from tests.families.geometries import manifest


def healing(**heal: Any) -> Manifest:
    calibration = {"text": {"files": ["/somewhere/a.txt"]}, "samples": 20, "sequence_length": 4, "shards": 2}
    return manifest({"method": "svd"}, calibration=calibration, heal=heal)


def samples(count: int) -> torch.Tensor:
    return torch.arange(count * 4).reshape(count, 4)


def test_the_calibration_samples_and_the_windows_held_out_of_its_text() -> None:
    held_out = samples(2) + 1000
    tokens = calibration_as_text(healing(), samples(20), held_out, (0,))
    assert torch.equal(tokens.trained, samples(20))
    assert torch.equal(tokens.held_out, held_out)
    assert torch.equal(tokens.windows, torch.cat([samples(20), held_out]))
    assert (tokens.prefix, tokens.names) == ((0,), ("a.txt",))
    some = calibration_as_text(healing(tokens=40), samples(20), held_out, ())
    assert torch.equal(some.trained, samples(20)[::2])


def test_a_tenth_of_the_samples_where_the_text_has_no_more() -> None:
    tokens = calibration_as_text(healing(), samples(20), None, ())
    assert torch.equal(tokens.held_out, samples(20)[[0, 10]])
    assert len(tokens.trained) == 18
    assert not set(tokens.trained.flatten().tolist()) & set(tokens.held_out.flatten().tolist())


@pytest.mark.parametrize("held_out", [None, samples(1)])
def test_too_few_tokens(held_out: torch.Tensor | None) -> None:
    with pytest.raises(InputError, match=r"heal\.tokens: 400: the text has 80 tokens"):
        calibration_as_text(healing(tokens=400), samples(20), held_out, ())
