"""The weights of a group with more experts than a worker holds, read expert by expert during a solve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

HELD = 2  # held experts, because a merged expert is compared with its dense one
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]


class StreamedWeights(Mapping[str, Tensor]):
    """Maps `role.weight` to dense weights.

    It holds the tensors outside of experts and the two experts that were used last, and reads the next one ahead.
    """

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        experts: Sequence[Sequence[str]],
        begin: Read,
        finish: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        thread: ThreadPoolExecutor,
    ) -> None:
        """Read the tensors outside of experts.

        Args:
            dtypes: name -> dtype of all tensors, in the group's order.
            experts: the names of each expert's tensors.
            begin: reads tensors and starts to copy them to the device; called in `thread`.
            finish: returns them on the device.
        """
        self._dtypes = dict(dtypes)
        self._experts = experts
        self._expert_of = {name: number for number, names in enumerate(experts) for name in names}
        self._begin, self._finish, self._thread = begin, finish, thread
        self._outside = dict(finish(begin([name for name in self._dtypes if name not in self._expert_of])))
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._ahead: tuple[int, Future[Mapping[str, Tensor]]] | None = None

    @property
    def described(self) -> dict[str, Tensor]:
        """Return tensors of the weights' dtypes without data."""
        return {name: torch.empty((), dtype=dtype, device="meta") for name, dtype in self._dtypes.items()}

    def __len__(self) -> int:
        return len(self._dtypes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __contains__(self, name: object) -> bool:
        return name in self._dtypes

    def __getitem__(self, name: str) -> Tensor:
        if name in self._outside:
            return self._outside[name]
        return self._expert(self._expert_of[name])[name]

    def _expert(self, number: int) -> Mapping[str, Tensor]:
        if number in self._held:
            tensors = self._held.pop(number)
        else:
            while len(self._held) >= HELD:
                del self._held[next(iter(self._held))]
            ahead, self._ahead = self._ahead, None
            future = ahead[1] if ahead is not None and ahead[0] == number else self._submit(number)
            tensors = self._finish(future.result())
            if number + 1 < len(self._experts) and number + 1 not in self._held:
                self._ahead = (number + 1, self._submit(number + 1))
        self._held[number] = tensors  # last, because it was used last
        return tensors

    def _submit(self, number: int) -> Future[Mapping[str, Tensor]]:
        return self._thread.submit(self._begin, self._experts[number])
