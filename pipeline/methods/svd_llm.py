"""A baseline: SVD-LLM, every weight by its singular values behind whitened inputs. docs/methods.md#baselines."""

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
        """S = M^{1/2}: with S Sᵀ = M, a Cholesky factor as in the paper or this one, the best product is the same."""
        return input_roots(moment_FF)
