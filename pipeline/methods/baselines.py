"""The baselines, for comparison with other methods. docs/methods.md#baselines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manifests.method_entry import MethodEntry
from manifests.methods import ASVD, REAP, SVD, SVDLLM, Frequency, HEAPr, Magnitude, MergeExperts
from pipeline.methods.asvd import ASVDMethod
from pipeline.methods.expert_pruning import FrequencyMethod, MergeExpertsMethod, REAPMethod
from pipeline.methods.heapr import HEAPrMethod
from pipeline.methods.magnitude import MagnitudeMethod
from pipeline.methods.method import Method
from pipeline.methods.svd import SVDMethod
from pipeline.methods.svd_llm import SVDLLMMethod

BASELINES: dict[type[MethodEntry], Callable[[Any, bool], Method]] = {
    SVD: SVDMethod,
    ASVD: ASVDMethod,
    SVDLLM: SVDLLMMethod,
    Magnitude: MagnitudeMethod,
    HEAPr: HEAPrMethod,
    REAP: REAPMethod,
    Frequency: FrequencyMethod,
    MergeExperts: MergeExpertsMethod,
}
