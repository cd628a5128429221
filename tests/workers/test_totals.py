"""Adding the sums of several workers: parts by name, and the release of the inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.errors import NumericsError
from manifests.records import ArrayRecord, GradientRecord
from pipeline.methods.method import Moment
from workers.totals import Totals, _added, _bands, _raised


def band(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_nothing_and_one_part() -> None:
    assert _added([]) == {}
    part = {"00000": band(1.0)}
    assert _added([part])["00000"] is part["00000"]  # without a copy


def test_parts_are_added_by_name_and_stay_unchanged() -> None:
    parts = [
        {"00000": band(1.0, 2.0), "norms-00000": band(9.0)},
        {"00000": band(10.0, 20.0)},
        {"00000": band(0.5, 0.5)},
    ]
    parts.append({"norms-00002": band(7.0), "00001": band(4.0)})
    before = [{name: tensor.clone() for name, tensor in part.items()} for part in parts]
    total = _added(parts)
    assert {name: tensor.tolist() for name, tensor in total.items()} == {
        "00000": [11.5, 22.5], "norms-00000": [9.0], "norms-00002": [7.0], "00001": [4.0],
    }  # fmt: skip
    for part, same in zip(parts, before, strict=True):
        assert all(torch.equal(part[name], same[name]) for name in same)


def test_each_tensor_is_brought_once() -> None:
    brought: list[Tensor] = []

    def bring(tensor: Tensor) -> Tensor:
        brought.append(tensor)
        return tensor.float()

    parts = [{"00000": band(1.0)}, {"00000": band(2.0)}, {"00000": band(3.0)}]
    assert _added(parts, bring)["00000"].dtype == torch.float32
    assert [id(tensor) for tensor in brought] == [id(part["00000"]) for part in parts]


def test_bands_are_in_order_and_without_norms() -> None:
    names = ["00010", "norms-00000", "00002", "00000"]
    assert [each.item() for each in _bands({name: band(int(name[-2:])) for name in names})] == [0.0, 2.0, 10.0]


def record_of(named: dict[str, Tensor], sequence: int) -> GradientRecord:
    record = ArrayRecord(
        version=1, path="moments/" + 32 * "0", shape=(1, 2, 2), dtype="float64", chunks=(1, 2, 2), symmetric=True,
        metadata_sha256="0" * 64, checksums=(),
    )  # fmt: skip
    return Totals._of_gradients(SimpleNamespace(tokens_shape=(99, sequence)), record, named)  # type: ignore[arg-type]


def test_norms_of_gradients_are_summed_with_one_rounding() -> None:
    shards = {"norms-00001": torch.tensor([[1.0, 1e16], [-1e16, 1.0]], dtype=torch.float64)}
    shards |= {"norms-00000": torch.tensor([[1e16, 0.0]], dtype=torch.float64), "00000": band(5.0)}
    record = record_of(shards, 8)
    assert record.square_norms == (1.0, 1e16)  # 1e16 + 1 - 1e16 and 0 + 1e16 + 1, whose sum is halfway to even
    assert (record.sequences, record.tokens) == (3, 24)  # of the samples that went back, not of all


@pytest.mark.parametrize(("kind", "named"), [("gradient", "gradients"), ("value", "activations")])
def test_values_that_no_grid_holds_are_named(kind: str, named: str) -> None:
    def raised(beyond_Gd: Tensor) -> None:
        raise ValueError("NaN")

    grid: Any = SimpleNamespace(raised=raised)
    moment = Moment("mlp.in", kind=kind)  # type: ignore[arg-type]
    with pytest.raises(NumericsError, match=f"layer 3: {named} at mlp.in: NaN"):
        _raised(3, moment, grid, torch.ones(1, 2))
