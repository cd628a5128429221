"""Sequences and mappings whose values are computed or loaded on access, so that few are in memory at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from torch import Tensor

T = TypeVar("T")
Offload = Callable[[Tensor], Callable[[], Tensor]]  # moves a tensor out of memory; the result loads it


def in_memory(tensor: Tensor) -> Callable[[], Tensor]:
    """Keep a tensor in this process's memory."""
    return lambda: tensor


class Deferred(Sequence[T]):
    """A sequence whose items are computed on each access."""

    def __init__(self, items: Sequence[Callable[[], T]]) -> None:
        """`items`: functions that compute one item each."""
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return Deferred(self._items[index])
        return self._items[index]()


class DeferredTensors(Mapping[str, Tensor]):
    """Tensors by name, each computed on access."""

    def __init__(self, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """`tensors`: name -> a function that computes the tensor."""
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]()
