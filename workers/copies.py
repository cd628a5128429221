"""Copies between a worker's device and its host's pinned memory, on a stream of their own, beside what is computed.

On a CPU there is nothing to cross: host and device are one.

B micro-batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stores.threads import parallel_map

PIECE_BYTES = 32 * 2**20  # of pinned memory, which copies that are under way hold


class HiddenReader(Protocol):
    """What can be read a micro-batch at a time."""

    def read(self, start: int, stop: int) -> Tensor:
        """Samples start to stop, (B, S, D), anywhere."""
        ...


class Copies:
    """Of one device. A copy begun is waited for by what comes after it on the device, not by the caller."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, on_device: bool) -> Tensor:
        """Memory on the device, or of the host: pinned there, so that copies need not be waited for."""
        place = self.device if on_device else torch.device("cpu")
        return torch.empty(shape, dtype=dtype, device=place, pin_memory=self.stream is not None and not on_device)

    def keep(self, place_BSD: Tensor, values_BSD: Tensor) -> None:
        """Copies values of the device to memory that `empty` gave; `finish` before the host reads them."""
        if self.stream is None or place_BSD.device == values_BSD.device:
            place_BSD.copy_(values_BSD)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            place_BSD.copy_(values_BSD, non_blocking=True)
        values_BSD.record_stream(self.stream)

    def finish(self) -> None:
        """Waits for what was begun."""
        if self.stream is not None:
            self.stream.synchronize()

    def batches(self, reader: HiddenReader, ranges: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
        """Micro-batches on the device: each is on its way while the one before is computed."""
        ahead: Tensor | None = None
        for start, stop in ranges:
            coming_BSD = self.bring(reader.read(start, stop))
            if ahead is not None:
                yield self.arrived(ahead)
            ahead = coming_BSD
            if self.stream is None:
                yield ahead
                ahead = None
        if ahead is not None:
            yield self.arrived(ahead)

    def bring(self, values: Tensor) -> Tensor:
        """Begins to copy values to the device: what is computed takes them as `arrived` gives them. From memory that is
        not pinned by way of pieces that are: several times as fast, and not to be waited for."""
        if self.stream is None or values.device.type == self.device.type:
            return values
        with torch.cuda.stream(self.stream):
            if values.is_pinned():
                return values.to(self.device, non_blocking=True)
            there = torch.empty(values.shape, dtype=values.dtype, device=self.device)
            length = PIECE_BYTES // values.itemsize
            for piece, place in zip(values.reshape(-1).split(length), there.view(-1).split(length), strict=True):
                pinned = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)
                place.copy_(pinned, non_blocking=True)
            return there

    def bring_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same of several, by as many threads as there are; what is computed next here may take them."""
        if self.stream is None:
            return list(tensors)
        return [self.arrived(values) for values in parallel_map(self.bring, tensors)]

    def arrived(self, values: Tensor) -> Tensor:
        """What `bring` gave, for what this thread computes next."""
        if self.stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self.stream)
            values.record_stream(computing)
        return values
