"""Sequences and mappings whose values are computed on each access, and not before."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from pipeline.kernels.deferred import Deferred, DeferredTensors, in_memory


def test_an_item_is_computed_on_each_access_and_no_other() -> None:
    computed: list[int] = []

    def item(number: int) -> int:
        computed.append(number)
        return 10 * number

    items = Deferred([partial(item, number) for number in range(4)])
    assert len(items) == 4
    part = items[1:3]
    assert len(part) == 2
    assert computed == []
    assert (items[2], items[2], part[0], items[-1]) == (20, 20, 10, 30)
    assert computed == [2, 2, 1, 3]
    assert list(part) == [10, 20]
    with pytest.raises(IndexError):
        items[4]


def test_tensors_are_looked_up_without_being_computed() -> None:
    def refuse() -> Tensor:
        raise AssertionError("computed")

    kept = torch.ones(2)
    tensors = DeferredTensors({"kept": in_memory(kept), "lost": refuse})
    assert [*tensors] == ["kept", "lost"]
    assert "lost" in tensors
    assert "other" not in tensors
    assert tensors["kept"] is kept
    with pytest.raises(AssertionError, match="computed"):
        tensors["lost"]
    with pytest.raises(KeyError):
        tensors["other"]
