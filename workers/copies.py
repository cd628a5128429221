"""Copies between a worker's device and pinned host memory, on a separate CUDA stream, parallel to computation.

On a CPU, tensors are returned unchanged.

B micro-batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from stores.threads import parallel_map

PIECE_BYTES = 32 * 2**20  # pinned memory of each running copy


class HiddenReader(Protocol):
    """Hidden states that are read a micro-batch at a time."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return samples start to stop (B, S, D), on any device."""
        ...


class Copies:
    """Copies to and from one device. Later work on the device waits for a copy; the caller does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, on_device: bool) -> Tensor:
        """Allocate memory on the device, or pinned memory on the host, so that copies are asynchronous."""
        place = self.device if on_device else torch.device("cpu")
        return torch.empty(shape, dtype=dtype, device=place, pin_memory=self.stream is not None and not on_device)

    def keep(self, place_BSD: Tensor, values_BSD: Tensor) -> None:
        """Copy values from the device to memory from `empty`. Call `finish` before the host reads them."""
        if self.stream is None or place_BSD.device == values_BSD.device:
            place_BSD.copy_(values_BSD)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            place_BSD.copy_(values_BSD, non_blocking=True)
        values_BSD.record_stream(self.stream)

    def finish(self) -> None:
        """Wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def batches(self, reader: HiddenReader, ranges: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield micro-batches on the device; each is copied while the one before is computed."""
        ahead: Tensor | None = None
        for start, stop in ranges:
            next_BSD = self.bring(reader.read(start, stop))
            if ahead is not None:
                yield self.arrived(ahead)
            ahead = next_BSD
            if self.stream is None:
                yield ahead
                ahead = None
        if ahead is not None:
            yield self.arrived(ahead)

    def bring(self, values: Tensor) -> Tensor:
        """Start to copy values to the device; pass the result to `arrived` before computing with it.

        Memory that is not pinned is copied through pinned pieces, which is asynchronous and several times as fast.
        """
        if self.stream is None or values.device.type == self.device.type:
            return values
        with torch.cuda.stream(self.stream):
            if values.is_pinned():
                return values.to(self.device, non_blocking=True)
            copied = torch.empty(values.shape, dtype=values.dtype, device=self.device)
            length = PIECE_BYTES // values.itemsize
            for piece, place in zip(values.reshape(-1).split(length), copied.view(-1).split(length), strict=True):
                pinned = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)
                place.copy_(pinned, non_blocking=True)
            return copied

    def ahead(self) -> AbstractContextManager[None]:
        """Return a context in which this thread computes on the copies' stream, after the copies that it starts."""
        context: AbstractContextManager[None] = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        return context

    def bring_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy several tensors with several threads; this thread may compute with the results."""
        if self.stream is None:
            return list(tensors)
        return [self.arrived(values) for values in parallel_map(self.bring, tensors)]

    def arrived(self, values: Tensor) -> Tensor:
        """Make this thread's next computation wait for a tensor from `bring`. Return the tensor."""
        if self.stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self.stream)
            values.record_stream(computing)
        return values
