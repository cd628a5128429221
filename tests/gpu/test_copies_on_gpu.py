"""Copies to a GPU, or the emulated one: whole, in pieces, from pinned memory, by several threads at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers import copies
from workers.copies import Copies

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64]
SHAPES = [(), (0, 3), (1,), (7,), (8, 8), (3, 5, 7), (1, 129)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("piece_bytes", [16, 256, 2**20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_arrives_is_what_was_sent(dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", piece_bytes)
    to_device = Copies(torch.device("cuda"))
    for shape in SHAPES:
        values = draw(shape, dtype)
        for sent in (
            values,
            values.pin_memory(),
            values.unsqueeze(-1).expand(*shape, 2),
            values.mT if values.ndim > 1 else values,
        ):
            found = to_device.arrived(to_device.bring(sent))
            assert found.is_cuda
            assert found.dtype == dtype
            assert torch.equal(found.cpu(), sent)
            assert to_device.bring(found) is found


def test_many_arrive_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 64)
    sent = [draw((length,), torch.float64, length) for length in range(1, 30)]
    found = Copies(torch.device("cuda")).bring_all(sent)
    for one, other in zip(found, sent, strict=True):
        assert torch.equal((one + 1).cpu(), other + 1)


def test_on_a_cpu_nothing_moves() -> None:
    here, sent = Copies(torch.device("cpu")), [draw((3,), torch.float32), draw((4,), torch.float32)]
    assert here.bring(sent[0]) is sent[0]
    assert all(one is other for one, other in zip(here.bring_all(sent), sent, strict=True))
