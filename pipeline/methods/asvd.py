"""A baseline: ASVD, the truncated SVD of every weight with scaled inputs. docs/methods.md#baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifests.methods import ASVD
from pipeline.kernels.lowrank import InputRoots
from pipeline.methods.separate import SeparateMethod

FLOOR = 1e-5  # of the largest size: inputs that are always zero would be scaled by zero


@dataclass(frozen=True)
class ASVDMethod(SeparateMethod[ASVD]):
    """`method: asvd` with the settings of its manifest entry."""

    name: ClassVar[str] = "asvd"

    def roots(self, moment_FF: Tensor) -> InputRoots:
        """Return S = diag(s)^alpha, s_i the root mean square of input i over their mean; clipped inputs are counted.

        The paper uses the mean magnitude of an input; a second moment gives the root mean square.
        """
        size_F = moment_FF.diagonal().double().clamp_min(0.0).sqrt()
        largest = float(size_F.max())
        if largest == 0.0:
            size_F, largest = torch.ones_like(size_F), 1.0
        clipped = int((size_F < FLOOR * largest).sum())
        size_F = size_F.clamp_min(FLOOR * largest)
        scale_F = (size_F / size_F.mean()) ** self.entry.alpha
        return InputRoots(torch.diag(scale_F), torch.diag(1.0 / scale_F), clipped)
