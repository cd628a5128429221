"""Solves a group by its method and names the factors as in the checkpoint; collects the tensors of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import Scheme
from pipeline.families.blocks import owner_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.capabilities import Correcting, SharingSizes
from pipeline.methods.experts.scores import few_tokens
from pipeline.methods.method import Group, Method, Moment, Ranks, Solution, Statistics, stored_dtype
from pipeline.methods.unchanged import BITS
from pipeline.rounding.schemes import WEIGHT
from pipeline.rounding.solutions import at_correction, round_solution
from pipeline.units.units import SolveDone, Write
from stores.formats import keeps
from stores.source import SourceCheckpoint
from workers.config import WorkerConfig
from workers.tensor_transfer import TensorTransfer, get_all

# Factors by their names in the checkpoint, their solution, and the schemes of rounded matrices by module path.
Solved = tuple[dict[str, Tensor], Solution, dict[str, Scheme]]


@dataclass(frozen=True)
class GroupProblem:
    """A group of a layer and its method. `weights`: the dense weights, by `role.weight` / `role.bias`."""

    method: Method
    group: Group
    geometry: LayerGeometry
    weights: Mapping[str, Tensor]
    quantize: Quantize | None = None


def solve_group(
    problem: GroupProblem, statistics: Statistics, ranks: Ranks, before: Mapping[str, Tensor] = MappingProxyType({})
) -> Solved:
    """Solve one group at some ranks.

    `before`: factors from the group's last correction. This correction replaces those of the roles that it changes.
    """
    group, geometry, weights = problem.group, problem.geometry, problem.weights
    if statistics.unseen:  # no token has reached these weights: they stay dense
        solution = Solution({} if before else dict(weights), {}, {"unseen": sorted(set(statistics.unseen))})
    elif _pair(statistics) is None:
        solution = problem.method.compress(group, geometry, weights, statistics, ranks)
    else:
        assert isinstance(problem.method, Correcting)
        names = {key: geometry.tensor_name(key, group.roles) for key in weights}
        factors = {key: before[name].to(weights[key].device) for key, name in names.items() if name in before}
        solution = problem.method.correct(group, geometry, weights, statistics, ranks, factors)
    return named_solution(problem, statistics, ranks, before, solution)


def solve_sizes(problem: GroupProblem, statistics: Statistics, sizes: Sequence[Ranks]) -> Iterator[Solved]:
    """Yield the solution of a group at each of several ranks, without a correction."""
    if isinstance(problem.method, SharingSizes) and not statistics.unseen:
        solutions = problem.method.compress_sizes(problem.group, problem.geometry, problem.weights, statistics, sizes)
        for ranks, solution in zip(sizes, solutions, strict=True):
            yield named_solution(problem, statistics, ranks, {}, solution)
    else:
        yield from (solve_group(problem, statistics, ranks) for ranks in sizes)


def named_solution(
    problem: GroupProblem, statistics: Statistics, ranks: Ranks, before: Mapping[str, Tensor], solution: Solution
) -> Solved:
    """Round a solution and name its factors as in the checkpoint."""
    group, geometry, weights, quantize = problem.group, problem.geometry, problem.weights, problem.quantize
    rounded: dict[str, Scheme] = {}
    if quantize is not None:
        bits = ranks[BITS] if quantize.bits == "auto" else quantize.bits
        moments = statistics.moments
        if (pair := _pair(statistics)) is not None:
            moments, quantize = at_correction(pair, moments, quantize, geometry.reads)
        solution, schemes, _ = round_solution(solution, quantize, bits, moments, weights, geometry.reads)
        for key, scheme in schemes.items():
            rounded[geometry.tensor_name(key + WEIGHT, group.roles).removesuffix(WEIGHT)] = scheme
    replaced = tuple(f"{geometry.path(role)}." for role in group.roles if _changes(solution, role))
    factors = {name: tensor for name, tensor in before.items() if not name.startswith(replaced)}
    for key, tensor in solution.tensors.items():
        factors[geometry.tensor_name(key, group.roles)] = tensor.to(stored_dtype(key, tensor, weights, solution.forms))
    if refitted := _refitted(problem, factors, solution):
        solution = replace(solution, report={**solution.report, "refitted": refitted})
    if passed := _passed(problem, statistics):
        solution = replace(solution, report={**solution.report, **passed})
    return factors, solution, rounded


def _refitted(problem: GroupProblem, factors: Mapping[str, Tensor], solution: Solution) -> list[str]:
    """Return the roles that stay dense but whose weights have changed."""
    changed = set()
    for key, dense in problem.weights.items():
        role = owner_of(key, problem.group.roles)
        factor = factors.get(problem.geometry.tensor_name(key, problem.group.roles))
        if role not in solution.forms and factor is not None and not torch.equal(factor, dense.to(factor)):
            changed.add(role)
    return sorted(changed)


def _passed(problem: GroupProblem, statistics: Statistics) -> dict[str, int]:
    """Return the number of tokens that passed an expert, and again as `few_tokens` if it is too small for its
    channels."""
    width = {block.writer.reads: block.width for block in problem.geometry.mlps if block.routing}
    counts = {
        moment.point: tokens
        for moment, tokens in statistics.passed.items()
        if moment.point in width and moment.kind == "value"
    }
    if len(counts) != 1:  # the group is no single expert
        return {}
    ((point, tokens),) = counts.items()
    few = {"few_tokens": tokens} if few_tokens(tokens, width[point]) else {}
    return {"tokens": tokens, **few}


def _changes(solution: Solution, role: str) -> bool:
    return role in solution.forms or any(key.startswith(f"{role}.") for key in solution.tensors)


def _pair(statistics: Statistics) -> Moment | None:
    """Return the moment of a correction, or None."""
    return next((moment for moment in statistics.moments if moment.kind == "pair"), None)


def solve_done(solved: Solved, transfer: TensorTransfer) -> SolveDone:
    """Make the factors available to other workers. Return the unit's result."""
    factors, solution, rounded = solved
    return SolveDone(transfer.put(factors), solution.forms, solution.report, rounded)


def layer_tensors(
    write: Write, setup: WorkerConfig, transfer: TensorTransfer, wanted: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Return all tensors of a compressed layer: the factors of its groups, and copies from the source.

    `wanted`: returns True for the names of tensors to return; None: all.

    A weight that the source stores in a format, and that no method has changed, stays as it is stored. Raises
    LostInputError if factors were lost with their node.
    """
    geometry, source = setup.geometry.layers[write.layer], setup.source
    tensors: dict[str, Tensor] = {}
    for factors in get_all(transfer, write.factors):
        tensors.update({name: tensor for name, tensor in factors.items() if wanted is None or wanted(name)})
    claimed = tuple(f"{geometry.path(role)}." for role in write.roles)
    names = [name for name in source.tensors if name.startswith(geometry.prefix)]
    kept = [name for name in names if name in tensors and _unchanged(source, name, tensors[name])]
    for name in kept:
        del tensors[name]
    copied = (name for name in names if not name.startswith(claimed) and (wanted is None or wanted(name)))
    tensors.update(source.read_kept([*kept, *copied]))
    return tensors


def _unchanged(source: SourceCheckpoint, name: str, tensor: Tensor) -> bool:
    """Return True for a weight that the source stores in a format, with the numbers that are decoded from it."""
    return keeps(source.tensors[name]) and torch.equal(tensor.cpu(), source.read([name])[name])
