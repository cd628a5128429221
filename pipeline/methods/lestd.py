"""LeSTD: attention, or MLP, of a layer as a Tucker decomposition with shared factors and a sparse core.

docs/methods.md#lestd.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, p projections of the MLP.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import LeSTD
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots
from pipeline.kernels.scales import equalize, scale_report
from pipeline.kernels.tucker import Tucker, rebuild, refine_sparse, shared_tucker, stack_attention, stack_mlp
from pipeline.methods import lestd_loss
from pipeline.methods.base import Group, Method
from pipeline.methods.lestd_problems import Layout, Problem, errors_of, weighted_inputs, weighted_output
from pipeline.methods.lestd_sizes import (
    GRID_PER_OCTAVE,
    ProblemShape,
    Ranks3,
    Rule,
    SizeChoice,
    best_choice,
    choices,
    pack_bits,
    size_curve,
    sizes_at_common_threshold,
)
from pipeline.methods.method import Moment, Ranks, Scores, Solution, group_key
from pipeline.methods.moments import input_moment
from pipeline.methods.work import Work
from pipeline.ranks.budget import RankKey, RankVariable

SIZE = "size"
SAFE_EXPONENT = 40  # bound on the exponent of a core's largest entry, so that relevant squares are normal in float32


@dataclass(frozen=True)
class SolvedProblem:
    """A problem's decomposition. `energies`: those of Stage I after each sweep."""

    choice: SizeChoice
    tucker: Tucker
    energies: tuple[float, ...]


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
    def layouts(self) -> list[Layout]:
        """Return the problems, without data."""

    @abstractmethod
    def problems(self) -> list[Problem]:
        """Return the problems of the layouts."""

    def stacked_roles(self, problem: Problem) -> list[tuple[str, ...]]:
        """Return the roles that each tensor of a problem holds, in the order of its third mode."""
        return [self.roles]

    @property
    def rule(self) -> Rule:
        """Return the limits of the choices."""
        return Rule(self.entry.ranks, self.entry.prune, not _own_output(self.entry), self.wide, self.multiple)

    @property
    def shapes(self) -> list[ProblemShape]:
        """Return the shapes of the problems."""
        return [layout.shape for layout in self.layouts]

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
        biases = sum(self.geometry.matrices[role].biases for role in self.roles)
        return (self.variable(SIZE, cap, lambda size: biases + min(max(size, least), cap), multiple=1),)

    def curve(self) -> Curve:
        """Predict the loss at each size, without refining cores."""
        problems, plain = self.problems(), self.entry.model_copy(update={"refine_sweeps": 0})

        def loss_at(size: int) -> float:
            errors: dict[str, Tensor] = {}
            for problem, part_size in zip(problems, self._split(size), strict=True):
                rebuilt = rebuild(_solve(plain, problem, self.rule, part_size).tucker)
                errors |= errors_of(problem, rebuilt, self.stacked_roles(problem))
            block = self.geometry.block_of(self.roles[0])
            return lestd_loss.loss_of(lestd_loss.matrix_changes(block, errors), self.statistics)

        (variable,) = self.variables()
        return lestd_loss.curve(variable, self.cache, loss_at)

    def measure(self) -> dict[str, Any]:
        """Return the best size at every threshold."""
        (problem,) = self.problems()
        squares, exponent = _squares(_whole(self.entry, problem))
        curve = size_curve(problem.layout.shape, self.rule, squares)
        return {**curve, "first": curve["first"] + GRID_PER_OCTAVE * exponent}

    def solve(self, ranks: Ranks) -> Solution:
        """Return `GROUP.tucker.first`, `.second`, `.third`, `.core` (or `.core.values`, `.core.mask`) and the biases.

        From the size of the dense weights on, return the dense weights.
        """
        if ranks[SIZE] >= self.dense_size:
            return self.dense()
        tensors = {name: bias for name, bias in self.weights.items() if name.endswith(".bias")}
        form: dict[str, Any] = {"form": "tucker"} | ({"own_output": True} if _own_output(self.entry) else {})
        report: dict[str, Any] = {}
        for problem, part_size in zip(self.problems(), self._split(ranks[SIZE]), strict=True):
            solved = _solve(self.entry, problem, self.rule, part_size)
            factors, entries = _stored(problem, solved)
            tensors |= {f"{self.name}.tucker.{name}": tensor for name, tensor in factors.items()}
            form |= {"sparse": solved.choice.count is not None} | _form(problem.layout, solved.choice) | entries
            report |= _report(problem, solved, sum(entries.values()))
        return Solution(tensors, dict.fromkeys(self.roles, FormSpec(**form)), report)

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
        return sum((self.solve_work(tokens) for _ in lestd_loss.SOLVED), start=Work())


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
    def layouts(self) -> list[Layout]:
        """Return one problem, or one for o and one for the others."""
        D, bits, attention, own = (
            self.geometry.hidden,
            self.geometry.bits,
            self.geometry.attention,
            _own_output(self.entry),
        )
        d, H, G = attention.head_dim, attention.heads, attention.kv_heads
        if H == G:
            layouts = [Layout(ProblemShape(D, d, ((3 if own else 4, H),), bits), ("",))]
        else:
            layouts = [
                Layout(ProblemShape(D, d, ((1 if own else 2, H), (2, G)), bits), ("_q" if own else "_qo", "_kv"))
            ]
        return [*layouts, Layout(ProblemShape(D, d, ((1, H),), bits), ("_o",), "_o")] if own else layouts

    def problems(self) -> list[Problem]:
        """Return the stacked heads of the weights, weighted by inputs if o is decomposed by itself."""
        attention, layouts = self.geometry.attention, self.layouts
        (query, key, value, output), scales = equalize([self.weight(matrix) for matrix in attention.matrices])
        stacked = stack_attention(query, key, value, output, attention.heads, attention.kv_heads)
        q, k, v, o = scales
        by_core = ((q, k, v, o),) if len(stacked) == 1 else ((q, o), (k, v))
        if not _own_output(self.entry):
            return [Problem(layouts[0], stacked, divisors=by_core)]
        last = stacked[0].shape[2] - 1  # q, k, v, o or q, o
        inputs, moments = [stacked[0][:, :, :last], *stacked[1:]], self.statistics.moments
        input_DD, context_Hdd = moments[input_moment(attention.query)][0], moments[_context(attention)]
        return [
            replace(weighted_inputs(layouts[0], inputs, input_DD), divisors=(by_core[0][:last], *by_core[1:])),
            replace(weighted_output(layouts[1], stacked[0][:, :, last:], context_Hdd), divisors=((o,),)),
        ]

    def stacked_roles(self, problem: Problem) -> list[tuple[str, ...]]:
        """Return the roles that each tensor of a problem holds, in the order of its third mode."""
        (query, key, value, output), own = self.roles, _own_output(self.entry)
        if problem.layout.own:
            return [(output,)]
        if self.geometry.attention.heads == self.geometry.attention.kv_heads:
            return [(query, key, value) if own else self.roles]
        return [(query,) if own else (query, output), (key, value)]


class MLP(TuckerBlock):
    """An MLP: (gate), up and down."""

    cache, wide = 0, True

    @property
    def layouts(self) -> list[Layout]:
        """Return one problem."""
        sizes = ((len(self.mlp.matrices), 1),)
        return [Layout(ProblemShape(self.geometry.hidden, self.mlp.width, sizes, self.geometry.bits), ("",))]

    def problems(self) -> list[Problem]:
        """Return the stacked projections."""
        parts, scales = equalize([self.weight(matrix) for matrix in self.mlp.matrices])
        return [Problem(self.layouts[0], stack_mlp(parts[:-1], parts[-1]), divisors=(tuple(scales),))]


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
            by_loss = lestd_loss.moments(block) if self.entry.needs_gradient else ()
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


def _whole(entry: LeSTD, problem: Problem) -> Tucker:
    """Return the HOSVD at full rank. Its leading blocks give the energy that smaller ranks keep."""
    return shared_tucker(problem.tensors, problem.layout.shape.full, 1, entry.tolerance)


def _solve(entry: LeSTD, problem: Problem, rule: Rule, size: int) -> SolvedProblem:
    """Run both stages at the ranks with the least predicted error.

    After refinement, the next larger R1 often has a smaller error of the weights, at twice the work. On
    `wiki-llama-mha-6m` it raises the perplexity as often as it lowers it, so it is not tried.
    """
    shape = problem.layout.shape
    if rule.ranks is not None:
        rule = replace(rule, ranks=_cut(rule.ranks, shape))
    options = list(choices(shape, rule, size))
    choice = options[0] if len(options) == 1 else best_choice(options, _squares(_whole(entry, problem))[0])
    tucker = whole = shared_tucker(problem.tensors, choice.ranks, entry.sweeps, entry.tolerance)
    if choice.count is not None:
        tucker = refine_sparse(problem.tensors, whole, choice.count, entry.refine_sweeps, entry.tolerance)
    return SolvedProblem(choice, tucker, whole.energies)


def _context(block: AttentionBlock) -> Moment:
    return Moment(block.writer.reads, heads=block.heads, groups=block.heads)


def _cut(ranks: Ranks3, shape: ProblemShape) -> Ranks3:
    """Limit R3, which applies to q, k, v and o together, to the number of projections in a problem."""
    return ranks[0], ranks[1], min(ranks[2], shape.full[2])


def _squares(whole: Tucker) -> tuple[list[Tensor], int]:
    """Return (g / 2^e)² in float32, precise enough to choose sizes, and e. e is 0 if the squares fit into float32."""
    exponent = math.frexp(max(float(core.abs().max()) for core in whole.cores))[1]
    exponent = 0 if abs(exponent) <= SAFE_EXPONENT else exponent
    return [(core * 2.0**-exponent).square().to(torch.float32) for core in whole.cores], exponent


def _stored(problem: Problem, solved: SolvedProblem) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Map names to the tensors of a solved problem, and `nnz` names to the core entries for its form."""
    layout, choice, tucker = problem.layout, solved.choice, solved.tucker
    first, second = tucker.first, tucker.second
    if problem.rows is not None:
        first = problem.rows.inverse @ first
    if problem.columns is not None:
        second = problem.columns.inverse @ second
    tensors = {f"first{layout.own}": first, f"second{layout.own}": second}
    entries = {}
    for suffix, third, core, divisors in zip(layout.cores, tucker.thirds, tucker.cores, problem.divisors, strict=True):
        third = third * third.new_tensor(divisors)[:, None]
        mask = (core != 0).contiguous()
        if not mask.any():
            mask.view(-1)[0] = True  # a form cannot have an empty core
        if problem.scales is not None:
            core = core / problem.scales
        if layout.own:
            core = core * third[0, 0]
        else:
            tensors[f"third{suffix}"] = third
        if choice.count is None:
            tensors[f"core{suffix}"] = core.contiguous()
        else:
            tensors |= {f"core{suffix}.values": core[mask], f"core{suffix}.mask": pack_bits(mask)}
            entries[f"nnz{suffix}"] = int(mask.sum())
    return tensors, entries


def _form(layout: Layout, choice: SizeChoice) -> dict[str, Any]:
    return {"ranks_o": list(choice.ranks[:2])} if layout.own else {"ranks": list(choice.ranks)}


def _report(problem: Problem, solved: SolvedProblem, entries: int) -> dict[str, Any]:
    """Return the relative squared error (of weighted weights, if there is a weighting), ranks, stored numbers,
    energies.

    `energies` are shares of the whole: after each sweep of Stage I, and `pruned` after the first cut of Stage II.
    """
    shape, end, choice, tucker = problem.layout.shape, problem.layout.own, solved.choice, solved.tucker
    total = tucker.total or 1.0
    pruned = {} if choice.count is None else {f"pruned{end}": tucker.energies[0] / total}
    core = sum(shape.positions(choice.ranks)) if choice.count is None else entries
    index = 0 if choice.count is None else shape.index(choice.ranks)
    clipped: Sequence[InputRoots] = [roots for roots in (problem.rows, problem.columns) if roots is not None]
    return {
        f"error{end}": tucker.error / total,
        f"tucker_ranks{end}": list(choice.ranks),
        f"core{end}": core,
        f"numbers{end}": shape.factors(choice.ranks) + index + core,
        f"numbers_without_index{end}": shape.factors(choice.ranks) + core,
        f"energies{end}": [round(energy / total, 6) for energy in solved.energies],
        **pruned,
        **{f"clipped{end}": roots.clipped for roots in clipped},
        **{f"{name}{end}": scales for name, scales in scale_report(sum(problem.divisors, ())).items()},
    }
