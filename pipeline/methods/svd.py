"""A baseline: the truncated SVD of every weight. docs/methods.md#baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifests.methods import SVD
from pipeline.kernels.lowrank import InputRoots
from pipeline.methods.separate import SeparateMethod


@dataclass(frozen=True)
class SVDMethod(SeparateMethod[SVD]):
    """`method: svd`."""

    name: ClassVar[str] = "svd"
    needs_inputs: ClassVar[bool] = False

    def roots(self, moment_FF: Tensor) -> InputRoots:
        """Raise NotImplementedError. It is never called, because inputs are not weighted."""
        raise NotImplementedError
