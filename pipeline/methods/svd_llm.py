"""A baseline: SVD-LLM, the truncated SVD of every weight with whitened inputs. docs/methods.md#baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifests.methods import SVDLLM
from pipeline.kernels.lowrank import InputRoots, input_roots
from pipeline.methods.separate import SeparateMethod


@dataclass(frozen=True)
class SVDLLMMethod(SeparateMethod[SVDLLM]):
    """`method: svd_llm`."""

    name: ClassVar[str] = "svd_llm"

    def roots(self, moment_FF: Tensor) -> InputRoots:
        """Return S = M^{1/2}. Any S with S Sᵀ = M gives the same product, such as the paper's Cholesky factor."""
        return input_roots(moment_FF)
