"""Solves groups with their methods, and names the factors as in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import Scheme
from pipeline.families.blocks import owner_of
from pipeline.kernels.deferred import DeferredTensors
from pipeline.methods.base import Group
from pipeline.methods.experts.mixture import ROUTER
from pipeline.methods.experts.scores import few_tokens
from pipeline.methods.method import Moment, Ranks, Solution, Statistics, stored_dtype
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.methods.unchanged import BITS
from pipeline.rounding.experts import round_by_expert
from pipeline.rounding.outputs import output_moments
from pipeline.rounding.schemes import WEIGHT
from pipeline.rounding.solutions import at_correction, round_solution
from pipeline.units.units import SolveDone
from workers.streamed_weights import StreamedWeights
from workers.tensor_transfer import TensorTransfer

# Factors by their names in the checkpoint, their solution, and the schemes of rounded matrices by module path.
NamedSolution = tuple[Mapping[str, Tensor], Solution, dict[str, Scheme]]


@dataclass(frozen=True)
class GroupProblem:
    """A group with its weights, and the settings of its rounding."""

    group: Group[Any]
    quantize: Quantize | None = None

    def with_statistics(self, statistics: Statistics, transfer: TensorTransfer | None = None) -> GroupProblem:
        """Return the problem with its statistics. With `transfer`, a solve of streamed weights stores its results
        outside of this process."""
        weights = self.group.weights
        if transfer is not None and isinstance(weights, StreamedWeights):
            statistics = replace(statistics, offload=transfer.offload)
        return replace(self, group=self.group.with_data(weights, statistics))


def solve_group(
    problem: GroupProblem, ranks: Ranks, before: Mapping[str, Tensor] = MappingProxyType({})
) -> NamedSolution:
    """Solve one group at some ranks.

    `before`: factors from the group's last correction. This correction replaces those of the roles that it changes.
    """
    group, weights, statistics = problem.group, problem.group.weights, problem.group.statistics
    if statistics.unseen:  # no token has reached these weights: they stay dense
        solution = Solution({} if before else weights, {}, {"unseen": sorted(set(statistics.unseen))})
    elif _pair(statistics) is None:
        solution = group.solve(ranks)
    else:
        names = {key: group.geometry.tensor_name(key, group.roles) for key in weights}
        factors = {key: before[name].to(weights[key].device) for key, name in names.items() if name in before}
        solution = group.correct(ranks, factors)
    return named_solution(problem, ranks, before, solution)


def solve_sizes(problem: GroupProblem, sizes: Sequence[Ranks]) -> Iterator[NamedSolution]:
    """Yield the solution of a group at each of several ranks, without a correction."""
    if problem.group.statistics.unseen:
        yield from (solve_group(problem, ranks) for ranks in sizes)
        return
    for ranks, solution in zip(sizes, problem.group.solve_sizes(sizes), strict=True):
        yield named_solution(problem, ranks, {}, solution)


def named_solution(
    problem: GroupProblem, ranks: Ranks, before: Mapping[str, Tensor], solution: Solution
) -> NamedSolution:
    """Round a solution and name its factors as in the checkpoint."""
    group, quantize = problem.group, problem.quantize
    geometry, weights, statistics = group.geometry, group.weights, group.statistics
    rounded: dict[str, Scheme] = {}
    if quantize is not None:
        bits = ranks[BITS] if quantize.bits == "auto" else quantize.bits
        moments = statistics.moments
        if (pair := _pair(statistics)) is not None:
            moments, quantize = at_correction(pair, group.corrections, moments, quantize, geometry.reads)
        described = weights.described if isinstance(weights, StreamedWeights) else weights
        if ROUTER in group.roles:
            solution, schemes = round_by_expert(
                solution, quantize, bits, moments, described, geometry.reads, statistics.offload
            )
        else:
            outputs = output_moments(group.roles, geometry) if quantize.feedback == "both" else {}
            solution, schemes, _ = round_solution(
                solution, quantize, bits, moments, described, geometry.reads, outputs=outputs
            )
        for key, scheme in schemes.items():
            rounded[geometry.tensor_name(key + WEIGHT, group.roles).removesuffix(WEIGHT)] = scheme
    factors = _stored(group, before, solution)
    if refitted := _refitted(group, factors, solution):
        solution = replace(solution, report={**solution.report, "refitted": refitted})
    if passed := _passed(group):
        solution = replace(solution, report={**solution.report, **passed})
    return factors, solution, rounded


def _stored(group: Group[Any], before: Mapping[str, Tensor], solution: Solution) -> Mapping[str, Tensor]:
    """Return the factors of a group by their names, in the dtypes of the checkpoint.

    With streamed weights, factors are computed on access.
    """
    geometry, dense = group.geometry, group.weights
    described = dense.described if isinstance(dense, StreamedWeights) else dense

    def stored(key: str) -> Tensor:
        tensor = solution.tensors[key]
        return tensor.to(stored_dtype(key, tensor, described, solution.forms))

    named = {geometry.tensor_name(key, group.roles): key for key in solution.tensors}
    if isinstance(dense, StreamedWeights):
        return DeferredTensors({name: partial(stored, key) for name, key in named.items()})
    replaced = tuple(f"{geometry.path(role)}." for role in group.roles if _changes(solution, role))
    kept = {name: tensor for name, tensor in before.items() if not name.startswith(replaced)}
    return kept | {name: stored(key) for name, key in named.items()}


def _refitted(group: Group[Any], factors: Mapping[str, Tensor], solution: Solution) -> list[str]:
    """Return the roles with changed dense weights."""
    changed = set()
    for key in group.weights:
        role, name = owner_of(key, group.roles), group.geometry.tensor_name(key, group.roles)
        if role not in solution.forms and name in factors:
            factor = factors[name]
            if not torch.equal(factor, group.weights[key].to(factor)):
                changed.add(role)
    return sorted(changed)


def _passed(group: Group[Any]) -> dict[str, Any]:
    """Return the number of tokens that passed an expert, and again as `few_tokens` if it is too small for its
    channels."""
    width = {block.writer.reads: block.width for block in group.geometry.mlps if block.routing}
    counts = {
        moment.point: tokens
        for moment, tokens in group.statistics.passed.items()
        if moment.point in width and moment.kind == "value"
    }
    if len(counts) != 1:  # the group is not a single expert
        return {}
    ((point, tokens),) = counts.items()
    few: dict[str, Any] = {"few_tokens": tokens} if few_tokens(tokens, width[point]) else {}
    few |= {} if tokens else {"unseen": [point]}
    return {"tokens": tokens, **few, **_by_source(group, point)}


def _by_source(group: Group[Any], point: str) -> dict[str, Any]:
    """Return the sampled tokens of the expert at a point by source, where its routing weights are sampled."""
    statistics = group.statistics
    (routing,) = (block.routing for block in group.geometry.mlps if block.writer.reads == point)
    samples = (
        each for moment, each in statistics.moments.items() if (moment.point, moment.kind) == (routing, "sample")
    )
    counts = statistics.sources.count(sample[0, :, 0] != 0) if (sample := next(samples, None)) is not None else {}
    return {BY_SOURCE: counts} if counts else {}


def _changes(solution: Solution, role: str) -> bool:
    return role in solution.forms or any(key.startswith(f"{role}.") for key in solution.tensors)


def _pair(statistics: Statistics) -> Moment | None:
    """Return the moment of a correction, or None."""
    return next((moment for moment in statistics.moments if moment.kind == "pair"), None)


def solve_done(solved: NamedSolution, transfer: TensorTransfer, parts: int = 1) -> SolveDone:
    """Make the factors available to other workers. Return the unit's result.

    Factors that are computed on access are transferred in `parts` parts.
    """
    factors, solution, rounded = solved
    if not isinstance(factors, DeferredTensors):
        return SolveDone(transfer.put(factors), solution.forms, solution.report, rounded)
    names = [*factors]
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    handles = [
        transfer.put(DeferredTensors({name: partial(factors.__getitem__, name) for name in names[first:end]}))
        for first, end in pairwise(cuts)
    ]
    return SolveDone(tuple(handles), solution.forms, solution.report, rounded)
