"""Values that are computed, or brought back, when they are asked for, so that few are in memory at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from torch import Tensor

T = TypeVar("T")
Aside = Callable[[Tensor], Callable[[], Tensor]]  # puts a tensor aside; the result brings it back


def in_memory(tensor: Tensor) -> Callable[[], Tensor]:
    """Put a tensor aside in this process's memory."""
    return lambda: tensor


class Deferred(Sequence[T]):
    """A sequence whose items are computed each time they are asked for."""

    def __init__(self, items: Sequence[Callable[[], T]]) -> None:
        """`items`: compute one item each."""
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
    """Tensors by name, each computed when it is asked for."""

    def __init__(self, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """`tensors`: name -> computes the tensor."""
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]()
