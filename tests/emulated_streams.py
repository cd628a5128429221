"""Streams of the emulated device: nothing runs beside anything, but what might have, is found.

Each stream counts what is begun on it. A stream knows how far others are by what it has waited for, and by what the
host had waited for when it began something there. Who touches memory must know that those who touched it before have
ended; memory must not go back to its stream while another is at it (`record_stream`); the host must not look at pinned
memory that a copy is still under way to. Threads of the host are taken for one.
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
    """What a tensor shares with its views: on the device, or pinned."""

    def __init__(self, streams: Streams, home: Stream | None) -> None:
        self.streams = streams
        self.home = home
        self.written: Clock = {}  # stream -> its last operation that wrote here
        self.read: Clock = {}
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        if self.home is None:
            return  # pinned memory, of which the allocator itself records who copies from it
        known = _joined(self.home.known, self.streams.host)
        for touched in (self.written, self.read):
            for stream, count in touched.items():
                if stream not in (self.home.number, *self.recorded) and known.get(stream, 0) < count:
                    self.streams.faults.append(f"memory of {self.home} was freed while stream {stream} was at it")


class Stream:
    """As torch.cuda.Stream: what is begun on it is done in order, beside other streams."""

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
    """As torch.cuda.Event."""

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
    """All of the device, and what the host knows."""

    def __init__(self, on_wait: Callable[[str], object]) -> None:
        """`on_wait`: is told when the host waits for a stream or an event."""
        self.on_wait = on_wait
        self.all: list[Stream] = []
        self.host: Clock = {}
        self.default = Stream(self)
        self.faults: list[str] = []
        self._of_thread = threading.local()
        self._pinned: dict[int, tuple[Memory, Any]] = {}  # by storage, which is kept: its address stays its own

    @property
    def current(self) -> Stream:
        """Of this thread."""
        found: Stream = getattr(self._of_thread, "stream", self.default)
        return found

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self._of_thread.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._of_thread.stream = before

    # -- who touches what ---------------------------------------------------------------------------------------------

    def allocate(self) -> Memory:
        """Memory that the current stream asked for: what was freed there may have been its last use."""
        memory = Memory(self, self.current)
        self.touch(memory, True)
        return memory

    def touch(self, memory: Memory, writes: bool) -> None:
        """The current stream begins something that reads or writes."""
        stream = self.current
        stream.known = _joined(stream.known, self.host)
        self._require_ended(memory, writes, stream.known, stream.number, str(stream))
        stream.begun += 1
        (memory.written if writes else memory.read)[stream.number] = stream.begun

    def record(self, memory: Memory, stream: Stream) -> None:
        """Tensor.record_stream."""
        memory.recorded.add(stream.number)

    def host_touches(self, tensor: Tensor, writes: bool) -> None:
        """The host reads or writes, if it is pinned."""
        memory = self.pinned(tensor)
        if memory is not None:
            self._require_ended(memory, writes, self.host, -1, "the host")

    def _require_ended(self, memory: Memory, writes: bool, known: Clock, own: int, who: str) -> None:
        for touched in (memory.written, memory.read) if writes else (memory.written,):
            for stream, count in touched.items():
                if stream != own and known.get(stream, 0) < count:
                    place = "".join(traceback.format_stack()[:-3][-8:])
                    does = "writes to" if writes else "reads"
                    self.faults.append(f"{who} {does} memory before stream {stream} is done with it\n{place}")

    # -- the host waits -----------------------------------------------------------------------------------------------

    def host_waits_for(self, stream: Stream) -> None:
        """For all that was begun there."""
        self.host = _joined(self.host, stream.known, {stream.number: stream.begun})

    def host_waits_for_current(self) -> None:
        """As a copy to pageable memory does."""
        self.host_waits_for(self.current)

    def host_waits_for_all(self) -> None:
        """torch.cuda.synchronize."""
        for stream in self.all:
            self.host_waits_for(stream)

    # -- pinned memory ------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Memory of the host is pinned from now on."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = Memory(self, None), storage

    def pinned(self, tensor: Tensor) -> Memory | None:
        """That of a tensor, if it is."""
        if tensor.is_cuda or tensor.device.type != "cpu":
            return None
        found = self._pinned.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """Tensor.pin_memory."""
        if self.pinned(tensor) is not None:
            return tensor
        copy = tensor.clone()
        self.pin(copy)
        return copy

    def require_order(self) -> None:
        """Raises AssertionError if anything was out of order."""
        if self.faults:
            raise AssertionError(f"{len(self.faults)} faults among streams, first:\n" + "\n".join(self.faults[:3]))


def _joined(*clocks: Clock) -> Clock:
    found: Clock = {}
    for clock in clocks:
        for stream, count in clock.items():
            found[stream] = max(count, found.get(stream, 0))
    return found
