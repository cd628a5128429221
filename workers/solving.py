"""Solutions as tensors of the checkpoint: a method's of one group, and all of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import Scheme
from pipeline.families.family import LayerGeometry
from pipeline.methods.method import (
    Correcting,
    Group,
    Method,
    Moment,
    Ranks,
    SharingSizes,
    Solution,
    Statistics,
    stored_dtype,
)
from pipeline.methods.unchanged import BITS
from pipeline.rounding.schemes import WEIGHT
from pipeline.rounding.solutions import at_correction, round_solution
from pipeline.units.units import SolveDone, Write
from workers.config import WorkerConfig
from workers.tensor_transfer import TensorTransfer, get_all

# Factors by their names in the checkpoint, the solution that they are of, and the schemes of rounded matrices by the
# path of their module.
Solved = tuple[dict[str, Tensor], Solution, dict[str, Scheme]]


def solve_group(
    method: Method,
    group: Group,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
    quantize: Quantize | None = None,
) -> Solved:
    """One group at some ranks.

    `geometry`: of the group's layer. `weights`: dense, by `role.weight` / `role.bias`. `before`: the factors that the
    group's last correction gave; those of roles that this one changes are replaced.
    """
    if statistics.unseen:  # nothing is known of these weights' inputs
        solution = Solution({} if before else dict(weights), {}, {"unseen": sorted(set(statistics.unseen))})
    elif _pair(statistics) is None:
        solution = method.compress(group, geometry, weights, statistics, ranks)
    else:
        assert isinstance(method, Correcting)
        names = {key: geometry.tensor_name(key, group.roles) for key in weights}
        known = {key: before[name].to(weights[key].device) for key, name in names.items() if name in before}
        solution = method.correct(group, geometry, weights, statistics, ranks, known)
    return _named(group, geometry, weights, statistics, ranks, before, quantize, solution)


def solve_sizes(
    method: Method,
    group: Group,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    sizes: Sequence[Ranks],
    quantize: Quantize | None = None,
) -> Iterator[Solved]:
    """As `solve_group` at each of some ranks, of which nothing was corrected; one after another."""
    if statistics.unseen:
        for ranks in sizes:
            yield solve_group(method, group, geometry, weights, statistics, ranks, {}, quantize)
        return
    if isinstance(method, SharingSizes):
        solutions = method.compress_sizes(group, geometry, weights, statistics, sizes)
    else:
        solutions = (method.compress(group, geometry, weights, statistics, ranks) for ranks in sizes)
    for ranks, solution in zip(sizes, solutions, strict=True):
        yield _named(group, geometry, weights, statistics, ranks, {}, quantize, solution)


def _named(
    group: Group,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
    quantize: Quantize | None,
    solution: Solution,
) -> Solved:
    """A solution, rounded, by the checkpoint's names."""
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
    if refitted := _refitted(group, geometry, weights, factors, solution):
        solution = replace(solution, report={**solution.report, "refitted": refitted})
    return factors, solution, rounded


def _pair(statistics: Statistics) -> Moment | None:
    """That of a correction, if it is one."""
    return next((moment for moment in statistics.moments if moment.kind == "pair"), None)


def handed_over(solved: Solved, transfer: TensorTransfer) -> SolveDone:
    """With the factors where other workers have them from."""
    factors, solution, rounded = solved
    return SolveDone(transfer.put(factors), solution.forms, solution.report, rounded)


def layer_tensors(write: Write, setup: WorkerConfig, transfer: TensorTransfer) -> dict[str, Tensor]:
    """All that is written of a layer: the factors of its groups, and what is copied from the source.

    Raises LostInputError: factors went with their node.
    """
    geometry, source = setup.geometry.layers[write.layer], setup.source
    tensors: dict[str, Tensor] = {}
    for factors in get_all(transfer, write.factors):
        tensors.update(factors)
    claimed = tuple(f"{geometry.path(role)}." for role in write.roles)
    names = (name for name in source.tensors if name.startswith(geometry.prefix))
    tensors.update(source.read([name for name in names if not name.startswith(claimed)]))
    return tensors


def _refitted(
    group: Group,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
    solution: Solution,
) -> list[str]:
    """The roles that stay dense with other numbers: what they read, or what is behind them, has changed."""
    changed = set()
    for key, dense in weights.items():
        role, found = key.partition(".")[0], factors.get(geometry.tensor_name(key, group.roles))
        if role not in solution.forms and found is not None and not torch.equal(found, dense.to(found)):
            changed.add(role)
    return sorted(changed)


def _changes(solution: Solution, role: str) -> bool:
    return role in solution.forms or any(key.startswith(f"{role}.") for key in solution.tensors)
