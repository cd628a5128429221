"""LeSTD: attention, or MLP, of a layer as a Tucker decomposition with shared factors and a sparse core.

docs/methods.md#lestd.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, p projections of the MLP.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from manifests.methods import LeSTD
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, Block, MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.scales import equalize
from pipeline.kernels.sensitivity import change_loss
from pipeline.kernels.tucker import rebuild, refine_sparse, shared_tucker, stack_attention, stack_mlp
from pipeline.methods.base import Group, Method
from pipeline.methods.lestd_problems import Problem, SolvedProblem, squares_of
from pipeline.methods.lestd_sizes import (
    GRID_PER_OCTAVE,
    ProblemShape,
    Rule,
    best_choice,
    choices,
    size_curve,
    sizes_at_common_threshold,
)
from pipeline.methods.method import Moment, Ranks, Scores, Solution, group_key
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.work import Work
from pipeline.ranks.budget import RankKey, RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

SIZE = "size"
SOLVED = (0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)  # solved sizes: 0 is the least size, 1 the largest
CHOICES = 64  # sizes of a curve, at most


class TuckerBlock(Group[LeSTD]):
    """The matrices of a block, as one or two Tucker problems. The size is the only rank."""

    @property
    @abstractmethod
    def cache(self) -> int:
        """Return the numbers per token that the block caches, at every size."""

    @property
    @abstractmethod
    def wide(self) -> bool:
        """Return True to search the rank of the second mode."""

    @property
    @abstractmethod
    def shapes(self) -> list[ProblemShape]:
        """Return the shapes of the problems."""

    @abstractmethod
    def problems(self) -> list[Problem]:
        """Return the problems."""

    @property
    def rule(self) -> Rule:
        """Return the limits of the choices."""
        return Rule(self.entry.ranks, self.entry.prune, not _own_output(self.entry), self.wide, self.multiple)

    @property
    def dense_size(self) -> int:
        """Count the numbers of the weights."""
        return sum(shape.dense for shape in self.shapes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest size that can be stored, and the largest useful one."""
        rule, dense = self.rule, self.dense_size
        sizes = [(rule.least(shape), rule.most(shape)) for shape in self.shapes]
        return min(sum(least for least, _ in sizes), dense), min(sum(most for _, most in sizes), dense)

    def check(self) -> None:
        """Raise ValueError on ranks above the full ones or that save nothing."""
        if self.entry.ranks is None:
            return
        limits = tuple(max(shape.full[mode] for shape in self.shapes) for mode in range(3))
        ranks = list(self.entry.ranks)
        if any(rank > limit for rank, limit in zip(ranks, limits, strict=True)):
            raise ValueError(f"ranks: {ranks} for {self.name}; this model allows up to {list(limits)}")
        stored, dense = self.bounds[0], self.dense_size
        if stored >= dense:
            core = "with one core entry" if self.entry.prune else "and a dense core"
            raise ValueError(f"ranks: {ranks} {core} store {stored:,} numbers, no fewer than the weights' {dense:,}")

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose `size`, the stored numbers including the index, without biases; the cap is the largest useful size."""
        least, cap = self.bounds
        biases = self.bias_numbers
        return (self.variable(SIZE, cap, lambda size: biases + min(max(size, least), cap), multiple=1),)

    def curve(self) -> Curve:
        """Predict the loss at each size, without refining cores."""
        problems = self.problems()

        def loss_at(size: int) -> float:
            errors: dict[str, Tensor] = {}
            for problem, part_size in zip(problems, self._split(size), strict=True):
                errors |= problem.errors(rebuild(self._solved(problem, part_size, refine_sweeps=0).tucker))
            return self.loss_of(errors)

        (variable,) = self.variables()
        return interpolated_curve(variable, self.cache, loss_at)

    def loss_of(self, errors: Mapping[str, Tensor]) -> float:
        """Sum ½ tr(G Δ C Δᵀ) over matrices, as if their errors were not correlated.

        `errors`: role -> the error (D, width, H) of the weight in its stacked tensor.
        """
        return sum(
            change_loss(
                errors[matrix.role].permute(0, 2, 1).flatten(1)
                if matrix.writes_stream
                else errors[matrix.role].permute(2, 1, 0).flatten(0, 1),
                self.mean(input_moment(matrix)),
                self.mean(output_gradient(matrix)),
            )
            for matrix in self.geometry.block_of(self.roles[0]).matrices
        )

    def measure(self) -> dict[str, Any]:
        """Return the best size at every threshold."""
        (problem,) = self.problems()
        squares, exponent = squares_of(problem.whole(self.entry.tolerance))
        curve = size_curve(problem.shape, self.rule, squares)
        return {**curve, "first": curve["first"] + GRID_PER_OCTAVE * exponent}

    def solve(self, ranks: Ranks) -> Solution:
        """Return `GROUP.tucker.first`, `.second`, `.third`, `.core` (or `.core.values`, `.core.mask`) and the biases.

        From the size of the dense weights on, return the dense weights.
        """
        if ranks[SIZE] >= self.dense_size:
            return self.dense()
        tensors = self.biases()
        form: dict[str, Any] = {"form": "tucker"} | ({"own_output": True} if _own_output(self.entry) else {})
        report: dict[str, Any] = {}
        for problem, part_size in zip(self.problems(), self._split(ranks[SIZE]), strict=True):
            solved = self._solved(problem, part_size, self.entry.refine_sweeps)
            factors, fields = solved.stored()
            tensors |= {f"{self.name}.tucker.{name}": tensor for name, tensor in factors.items()}
            form |= {"sparse": solved.choice.count is not None} | fields
            report |= solved.report(sum(count for name, count in fields.items() if name.startswith("nnz")))
        return Solution(tensors, dict.fromkeys(self.roles, FormSpec(**form)), report)

    def _solved(self, problem: Problem, size: int, refine_sweeps: int) -> SolvedProblem:
        """Run both stages at the ranks with the least predicted error.

        After refinement, the next larger R1 often has a smaller error of the weights, at twice the work. On
        `wiki-llama-mha-6m` it raises the perplexity as often as it lowers it, so it is not tried.
        """
        entry, rule, shape = self.entry, self.rule, problem.shape
        if rule.ranks is not None:  # R3 applies to q, k, v and o together
            rule = replace(rule, ranks=(*rule.ranks[:2], min(rule.ranks[2], shape.full[2])))
        options = list(choices(shape, rule, size))
        choice = options[0]
        if len(options) > 1:
            choice = best_choice(options, squares_of(problem.whole(entry.tolerance))[0])
        tucker = whole = shared_tucker(problem.tensors, choice.ranks, entry.sweeps, entry.tolerance)
        if choice.count is not None:
            tucker = refine_sparse(problem.tensors, whole, choice.count, refine_sweeps, entry.tolerance)
        return SolvedProblem(problem, choice, tucker, whole.energies)

    def _split(self, size: int) -> list[int]:
        """Divide a size among the problems by their dense numbers."""
        rule, shapes, size = self.rule, self.shapes, max(size, self.bounds[0])
        if len(shapes) == 1:
            return [size]
        first, last = shapes
        share = round(size * first.dense / (first.dense + last.dense))
        share = max(rule.least(first), min(share, size - rule.least(last)))
        return [share, size - share]

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the Gram matrices of both long modes and their eigenvectors, once and in each sweep."""
        turns, shapes = 1 + self.entry.sweeps, self.shapes
        products = sum(2.0 * shape.dense * (shape.hidden + shape.width) for shape in shapes)
        return Work(turns * products, vectors=turns * sum(float(shape.hidden**3 + shape.width**3) for shape in shapes))

    def curve_work(self, tokens: int) -> Work:
        """Count a solve for each solved size."""
        return sum((self.solve_work(tokens) for _ in SOLVED), start=Work())


class Attention(TuckerBlock):
    """Attention: q, k, v and o, or o by itself."""

    @property
    def cache(self) -> int:
        """Return the numbers of keys and values."""
        return self.geometry.attention.cache_numbers

    @property
    def wide(self) -> bool:
        """Return True if the core is not pruned: d × d is small."""
        return not self.entry.prune

    @property
    def shapes(self) -> list[ProblemShape]:
        """Return one problem, or one for o and one for the others."""
        block, D, bits, own = self.geometry.attention, self.geometry.hidden, self.geometry.bits, _own_output(self.entry)
        d, H, G = block.head_dim, block.heads, block.kv_heads
        if H == G:
            first = ProblemShape(D, d, ((3 if own else 4, H),), bits)
        else:
            first = ProblemShape(D, d, ((1 if own else 2, H), (2, G)), bits, ("_q" if own else "_qo", "_kv"))
        return [first, ProblemShape(D, d, ((1, H),), bits, ("_o",), "_o")] if own else [first]

    def problems(self) -> list[Problem]:
        """Return the stacked heads of the weights, weighted by inputs if o is decomposed by itself."""
        block, (first, *own) = self.geometry.attention, self.shapes
        (query, key, value, output), scales = equalize([self.weight(matrix) for matrix in block.matrices])
        stacked = stack_attention(query, key, value, output, block.heads, block.kv_heads)
        (q, k, v, o), divisors = self.roles, dict(zip(self.roles, scales, strict=True))
        roles = (self.roles,) if len(stacked) == 1 else ((q, o), (k, v))
        if not own:
            return [Problem(first, stacked, roles, divisors)]
        last = stacked[0].shape[2] - 1  # q, k, v, o or q, o
        inputs, moments = [stacked[0][:, :, :last], *stacked[1:]], self.statistics.moments
        readers = Problem(first, inputs, (roles[0][:last], *roles[1:]), divisors)
        writer = Problem(own[0], [stacked[0][:, :, last:]], ((o,),), divisors)
        return [
            readers.weighted_inputs(moments[input_moment(block.query)][0]),
            writer.weighted_output(moments[_context(block)]),
        ]


class MLP(TuckerBlock):
    """An MLP: (gate), up and down."""

    cache, wide = 0, True

    @property
    def shapes(self) -> list[ProblemShape]:
        """Return one problem."""
        stacks = ((len(self.mlp.matrices), 1),)
        return [ProblemShape(self.geometry.hidden, self.mlp.width, stacks, self.geometry.bits)]

    def problems(self) -> list[Problem]:
        """Return the stacked projections."""
        parts, scales = equalize([self.weight(matrix) for matrix in self.mlp.matrices])
        divisors = dict(zip(self.roles, scales, strict=True))
        return [Problem(self.shapes[0], stack_mlp(parts[:-1], parts[-1]), (self.roles,), divisors)]


@dataclass(frozen=True)
class LeSTDMethod(Method[LeSTD]):
    """`method: lestd` with the settings of its manifest entry."""

    name: ClassVar[str] = "lestd"

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry gives ranks and the core is not pruned."""
        return self.entry.fixed

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Return the layout of sparse cores in the memory of a server."""
        return {"core_format": self.entry.core}

    def groups(self, layer: LayerGeometry) -> Iterator[TuckerBlock]:
        """Claim groups `attention` (q, k, v, o) and `mlp` ((gate), up, down).

        Raises ValueError on ranks above the full ones or that save nothing.
        """
        for block in layer.blocks:
            target = "mlp" if isinstance(block, MLPBlock) else "attention"
            if self.entry.target not in (target, "both"):
                continue
            own = (input_moment(block.readers[0]), _context(layer.attention)) if _own_output(self.entry) else ()
            by_loss = loss_moments(block) if self.entry.needs_gradient else ()
            kind = MLP if target == "mlp" else Attention
            group = kind(self.entry, layer, block.name, block.roles, tuple(dict.fromkeys((*own, *by_loss))))
            group.check()
            yield group

    def measures(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Measure the claimed groups with `threshold: model`, as sizes then follow the spectra of the layers."""
        return self.claims(geometry) if self.entry.threshold == "model" else ()

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return `ratio` of the dense numbers of every layer, or sizes with the same sum at a common threshold."""
        variables = self.rank_variables(geometry)
        if self.fixed_ranks:
            return {variable.key: float(variable.cap) for variable in variables}
        dense = [group.dense_size for group in self.chosen(geometry, self.groups)]
        even = [min(ratio * numbers, variable.cap) for numbers, variable in zip(dense, variables, strict=True)]
        if self.entry.threshold == "layer" or scores.measured is None or ratio >= 1.0:
            return {variable.key: size for variable, size in zip(variables, even, strict=True)}
        curves = [scores.measured[group_key(variable.layer, variable.group)] for variable in variables]
        sizes = sizes_at_common_threshold(curves, [variable.cap for variable in variables], sum(even))
        return {variable.key: size for variable, size in zip(variables, sizes, strict=True)}


def _own_output(entry: LeSTD) -> bool:
    """Return True if o is decomposed by itself, because its input differs from that of q, k and v."""
    return entry.weighting == "input"


def _context(block: AttentionBlock) -> Moment:
    return Moment(block.writer.reads, heads=block.heads, groups=block.heads)


def loss_moments(block: Block) -> tuple[Moment, ...]:
    """Return the moments of each matrix's input and of the gradients at its outputs."""
    inputs, gradients = map(input_moment, block.matrices), map(output_gradient, block.matrices)
    return tuple(dict.fromkeys((*inputs, *gradients)))


def interpolated_curve(variable: RankVariable, cache: int, loss_at: Callable[[int], float]) -> Curve:
    """Solve a few sizes, and interpolate the logarithm of the loss between them. The loss at the cap is 0.

    `cache`: the numbers per token that the group caches, at every size.
    """
    least, cap = variable.least, variable.cap
    while variable.cost(least) == variable.cost(min(least * 2, cap)) and least * 2 < cap:
        least *= 2  # sizes below the smallest that can be stored cost the same
    sizes = sorted({round(least + share * (cap - least)) for share in SOLVED} - {cap})
    solved = [(size, loss_at(size)) for size in sizes]
    choices = [size for size in steps(cap, variable.multiple, CHOICES, sizes[0]) if size < cap]
    points = [
        Point({variable.name: size}, round(variable.cost(size)), _between(solved, size), cache) for size in choices
    ]
    return to_columns([*points, Point({variable.name: cap}, round(variable.cost(cap)), 0.0, cache)])


def _between(solved: Sequence[tuple[int, float]], size: int) -> float:
    below = max((pair for pair in solved if pair[0] <= size), default=solved[0])
    above = min((pair for pair in solved if pair[0] > size), default=solved[-1])
    if below[0] == above[0] or min(below[1], above[1]) <= 0.0:
        return below[1]
    share = (size - below[0]) / (above[0] - below[0])
    return math.exp((1.0 - share) * math.log(below[1]) + share * math.log(above[1]))
