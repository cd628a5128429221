"""Streams of the emulated device: operations run one after another, but races that a GPU could have are detected.

Each stream numbers its operations. A vector clock holds the operations of other streams that are known to have ended:
those that this stream waited for, and those that the host had waited for at its last launch. An operation may touch
memory only if earlier operations on it are known to have ended. Memory must not be freed while another stream uses it
(`record_stream`), and the host must not touch pinned memory during a copy. All threads of the host share one clock.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Clock = dict[int, int]  # stream -> how many of its operations are known to have ended


class Memory:
    """Memory of the device, or pinned memory of the host, that a tensor shares with its views."""

    def __init__(self, streams: Streams, home: Stream | None) -> None:
        self.streams = streams
        self.home = home
        self.written: Clock = {}  # stream -> its last operation that wrote here
        self.read: Clock = {}
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        if self.home is None:
            return  # pinned memory, whose users the allocator itself records
        known = _joined(self.home.known, self.streams.host)
        for touched in (self.written, self.read):
            for stream, count in touched.items():
                if stream not in (self.home.number, *self.recorded) and known.get(stream, 0) < count:
                    self.streams.faults.append(f"memory of {self.home} was freed while stream {stream} used it")


class Stream:
    """Replaces torch.cuda.Stream: its operations run in order, beside those of other streams."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.number = len(streams.all)
        self.known: Clock = {}
        self.begun = 0
        streams.all.append(self)

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def wait_stream(self, other: Stream) -> None:
        self.known = _joined(self.known, other.known, {other.number: other.begun})

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.streams) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.known = _joined(self.known, event.known)

    def synchronize(self) -> None:
        self.streams.on_wait("synchronize a stream")
        self.streams.host_waits_for(self)


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.known: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = self.streams.current if stream is None else stream
        self.known = _joined(stream.known, {stream.number: stream.begun})

    def wait(self, stream: Stream | None = None) -> None:
        (self.streams.current if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self.streams.on_wait("synchronize an event")
        self.streams.host = _joined(self.streams.host, self.known)


class Streams:
    """All streams of the device, and the host's clock."""

    def __init__(self, on_wait: Callable[[str], object]) -> None:
        """`on_wait`: called when the host waits for a stream or an event."""
        self.on_wait = on_wait
        self.all: list[Stream] = []
        self.host: Clock = {}
        self.default = Stream(self)
        self.faults: list[str] = []
        self._of_thread = threading.local()
        self._pinned: dict[int, tuple[Memory, Any]] = {}  # by storage, kept alive so that its address stays unique

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        stream: Stream = getattr(self._of_thread, "stream", self.default)
        return stream

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """Replaces torch.cuda.stream."""
        before, self._of_thread.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._of_thread.stream = before

    # -- accesses to memory -------------------------------------------------------------------------------------------

    def allocate(self) -> Memory:
        """Allocate memory for the current stream."""
        memory = Memory(self, self.current)
        self.touch(memory, True)
        return memory

    def touch(self, memory: Memory, writes: bool) -> None:
        """Record an operation of the current stream that reads or writes memory."""
        stream = self.current
        stream.known = _joined(stream.known, self.host)
        self._require_ended(memory, writes, stream.known, stream.number, str(stream))
        stream.begun += 1
        (memory.written if writes else memory.read)[stream.number] = stream.begun

    def record(self, memory: Memory, stream: Stream) -> None:
        """Replaces Tensor.record_stream."""
        memory.recorded.add(stream.number)

    def host_touches(self, tensor: Tensor, writes: bool) -> None:
        """Record that the host reads or writes a tensor, if its memory is pinned."""
        memory = self.pinned(tensor)
        if memory is not None:
            self._require_ended(memory, writes, self.host, -1, "the host")

    def _require_ended(self, memory: Memory, writes: bool, known: Clock, own: int, who: str) -> None:
        for touched in (memory.written, memory.read) if writes else (memory.written,):
            for stream, count in touched.items():
                if stream != own and known.get(stream, 0) < count:
                    place = "".join(traceback.format_stack()[:-3][-8:])
                    does = "writes to" if writes else "reads"
                    self.faults.append(f"{who} {does} memory before stream {stream} has finished with it\n{place}")

    # -- the host waits -----------------------------------------------------------------------------------------------

    def host_waits_for(self, stream: Stream) -> None:
        """Record that the host waits for all operations of a stream."""
        self.host = _joined(self.host, stream.known, {stream.number: stream.begun})

    def host_waits_for_current(self) -> None:
        """Record that the host waits for the current stream, as for a copy to pageable memory."""
        self.host_waits_for(self.current)

    def host_waits_for_all(self) -> None:
        """Record that the host waits for all streams."""
        for stream in self.all:
            self.host_waits_for(stream)

    # -- pinned memory ------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Mark the memory of a host tensor as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = Memory(self, None), storage

    def pinned(self, tensor: Tensor) -> Memory | None:
        """Return the pinned memory of a tensor, or None."""
        if tensor.is_cuda or tensor.device.type != "cpu":
            return None
        entry = self._pinned.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """Replaces Tensor.pin_memory."""
        if self.pinned(tensor) is not None:
            return tensor
        copy = tensor.clone()
        self.pin(copy)
        return copy

    def require_order(self) -> None:
        """Raise AssertionError if there was a race."""
        if self.faults:
            raise AssertionError(f"{len(self.faults)} faults among streams, first:\n" + "\n".join(self.faults[:3]))


def _joined(*clocks: Clock) -> Clock:
    joined: Clock = {}
    for clock in clocks:
        for stream, count in clock.items():
            joined[stream] = max(count, joined.get(stream, 0))
    return joined
