"""A baseline: ASVD, the truncated SVD of every weight with scaled inputs. docs/methods.md#baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifests.methods import ASVD
from pipeline.kernels.lowrank import InputRoots
from pipeline.methods.separate import SeparateMethod

FLOOR = 1e-5  # smallest size, relative to the largest: an input that is always zero would be scaled by zero


@dataclass(frozen=True)
class ASVDMethod(SeparateMethod[ASVD]):
    """`method: asvd` with the settings of its manifest entry."""

    name: ClassVar[str] = "asvd"

    def roots(self, moment_FF: Tensor) -> InputRoots:
        """Return S = diag(s)^alpha, where s_i is the root mean square of input i divided by the mean over inputs.

        The result counts clipped inputs. The paper uses the mean magnitude of an input, which a second moment does not
        give.
        """
        size_F = moment_FF.diagonal().double().clamp_min(0.0).sqrt()
        largest = float(size_F.max())
        if largest == 0.0:
            size_F, largest = torch.ones_like(size_F), 1.0
        clipped = int((size_F < FLOOR * largest).sum())
        size_F = size_F.clamp_min(FLOOR * largest)
        scale_F = (size_F / size_F.mean()) ** self.entry.alpha
        return InputRoots(torch.diag(scale_F), torch.diag(1.0 / scale_F), clipped)
