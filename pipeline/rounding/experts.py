"""Rounds the experts of a layer that were chosen together, one after another. docs/methods.md#rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import Scheme
from pipeline.kernels.deferred import DeferredTensors, Offload
from pipeline.methods.method import Moment, Solution, Weights
from pipeline.rounding.solutions import Feedbacks, Reads, round_solution


def round_by_expert(
    solution: Solution,
    quantize: Quantize,
    bits: int,
    moments: Mapping[Moment, Tensor],
    weights: Weights,
    reads: Reads,
    offload: Offload,
) -> tuple[Solution, dict[str, Scheme]]:
    """Round the matrices of a solution's experts, and return it with their schemes by module path.

    One expert is in memory at a time; `offload` stores its codes and scales. The router is never rounded.
    `solution`: its keys are ordered by expert. The other arguments and the errors are those of `round_solution`.
    """
    feedbacks, tensors, schemes = Feedbacks(quantize), dict[str, Callable[[], Tensor]](), dict[str, Scheme]()
    parts = []
    for expert, keys in groupby(solution.tensors, _expert):
        one = replace(solution, tensors={key: solution.tensors[key] for key in keys}, report={})
        if expert:
            one, by_path, _ = round_solution(one, quantize, bits, moments, weights, reads, feedbacks)
            schemes |= by_path
            parts.append(one.report)
        tensors |= {name: offload(tensor) for name, tensor in one.tensors.items()}
    report = dict(solution.report)
    if schemes:
        report["rounding_error"] = max(part.get("rounding_error", 0.0) for part in parts)
    for name in ("levels", "nearest"):
        if several := sorted({each for part in parts for each in part.get(name, ())}):
            report[name] = several
    return replace(solution, tensors=DeferredTensors(tensors), report=report), schemes


def _expert(key: str) -> str:
    """Return the block of a tensor, `experts.3`; empty for those of the router."""
    role, _, _ = key.rpartition(".")
    return role.rpartition(".")[0]
