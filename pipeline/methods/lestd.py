"""LeSTD: attention, or MLP, of a layer as a Tucker decomposition with shared factors and a sparse core.

docs/methods.md#lestd.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, p projections of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import LeSTD
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, Block, MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots
from pipeline.kernels.scales import equalize, scale_report
from pipeline.kernels.tucker import Tucker, rebuild, refine_sparse, shared_tucker, stack_attention, stack_mlp
from pipeline.methods import lestd_loss
from pipeline.methods.base import MethodBase
from pipeline.methods.lestd_problems import Layout, Problem, errors_of, weighted_inputs, weighted_output
from pipeline.methods.lestd_sizes import (
    GRID_PER_OCTAVE,
    Choice,
    Part,
    Ranks3,
    Rule,
    best_choice,
    choices,
    pack_bits,
    size_curve,
    sizes_at_common_threshold,
)
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights, group_key
from pipeline.methods.moments import input_moment
from pipeline.ranks.budget import RankVariable

SIZE = "size"
SAFE_EXPONENT = 40  # bound on the exponent of a core's largest entry, so that relevant squares are normal in float32


@dataclass(frozen=True)
class Solved:
    """A problem's decomposition. `energies`: those of Stage I after each sweep."""

    choice: Choice
    tucker: Tucker
    energies: tuple[float, ...]


@dataclass(frozen=True)
class LeSTDMethod(MethodBase[LeSTD]):
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

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim groups `attention` (q, k, v, o) and `mlp` ((gate), up, down) of every chosen layer.

        Raises ValueError on layers that do not exist, and on ranks above the full ones or that save nothing.
        """
        kinds = {"attention": AttentionBlock, "mlp": MLPBlock, "both": Block}[self.entry.target]
        return tuple(
            self._group(layer, block)
            for layer in self.chosen_layers(geometry)
            for block in layer.blocks
            if isinstance(block, kinds)
        )

    def _group(self, layer: LayerGeometry, block: Block) -> Group:
        self._check(layer, block)
        own = (input_moment(block.readers[0]), _context(layer.attention)) if self._own_output else ()
        by_loss = lestd_loss.moments(block) if self.entry.needs_gradient else ()
        return Group(layer.index, block.name, block.roles, tuple(dict.fromkeys((*own, *by_loss))))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss at each size, without refining cores."""
        block = geometry.block_of(group.roles[0])
        problems = self._problems(block, geometry, weights, statistics.moments)
        plain = replace(self, entry=self.entry.model_copy(update={"refine_sweeps": 0}))

        def loss_at(size: int) -> float:
            errors: dict[str, Tensor] = {}
            for problem, part_size in zip(problems, self._split(geometry, block, size), strict=True):
                rebuilt = rebuild(plain._solve(problem, self._rule(geometry, block), part_size).tucker)
                errors |= errors_of(problem, rebuilt, self._stacked_roles(block, problem))
            return lestd_loss.loss_of(lestd_loss.matrix_changes(block, errors), statistics)

        (variable,) = self.group_variables(group, geometry)
        cache = block.cache_numbers if isinstance(block, AttentionBlock) else 0
        return lestd_loss.curve(variable, cache, loss_at)

    def _stacked_roles(self, block: Block, problem: Problem) -> list[tuple[str, ...]]:
        """Return the roles that each tensor of a problem holds, in the order of its third mode."""
        if not isinstance(block, AttentionBlock):
            return [block.roles]
        query, key, value, output = block.roles
        if problem.layout.own:
            return [(output,)]
        if block.heads == block.kv_heads:
            return [(query, key, value) if self._own_output else block.roles]
        return [(query,) if self._own_output else (query, output), (key, value)]

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose `size`, the stored numbers including the index, without biases; the cap is the largest useful size."""
        block = geometry.block_of(group.roles[0])
        least, cap = self._bounds(geometry, block)
        biases = sum(matrix.biases for matrix in block.matrices)
        return (RankVariable(group.layer, group.name, SIZE, cap, 1, _cost(least, cap, biases)),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return `ratio` of the dense numbers of every layer, or sizes with the same sum at a common threshold."""
        variables = self.rank_variables(geometry)
        if self.fixed_ranks:
            return {variable.key: float(variable.cap) for variable in variables}
        layers = (geometry.layers[variable.layer] for variable in variables)
        named = zip(layers, variables, strict=True)
        dense = [self._dense(layer, layer.block(variable.group)) for layer, variable in named]
        even = [min(ratio * numbers, variable.cap) for numbers, variable in zip(dense, variables, strict=True)]
        if self.entry.threshold == "layer" or scores.measured is None or ratio >= 1.0:
            return {variable.key: size for variable, size in zip(variables, even, strict=True)}
        curves = [scores.measured[group_key(variable.layer, variable.group)] for variable in variables]
        sizes = sizes_at_common_threshold(curves, [variable.cap for variable in variables], sum(even))
        return {variable.key: size for variable, size in zip(variables, sizes, strict=True)}

    def measures(self, geometry: Geometry) -> tuple[Group, ...]:
        """Measure the claimed groups with `threshold: model`, as sizes then follow the spectra of the layers."""
        return self.claims(geometry) if self.entry.threshold == "model" else ()

    def measure(self, group: Group, geometry: LayerGeometry, weights: Weights) -> dict[str, Any]:
        """Return the best size at every threshold."""
        block = geometry.block_of(group.roles[0])
        (problem,) = self._problems(block, geometry, weights, {})
        squares, exponent = _squares(self._whole(problem))
        curve = size_curve(problem.layout.part, self._rule(geometry, block), squares)
        return {**curve, "first": curve["first"] + GRID_PER_OCTAVE * exponent}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Return `GROUP.tucker.first`, `.second`, `.third`, `.core` (or `.core.values`, `.core.mask`) and the biases.

        From the size of the dense weights on, return the dense weights.
        """
        size, block = ranks[SIZE], geometry.block_of(group.roles[0])
        if size >= self._dense(geometry, block):
            return Solution(dict(weights), {}, {"dense": True})
        tensors = {name: bias for name, bias in weights.items() if name.endswith(".bias")}
        problems = self._problems(block, geometry, weights, statistics.moments)
        form: dict[str, Any] = {"form": "tucker"} | ({"own_output": True} if self._own_output else {})
        report: dict[str, Any] = {}
        for problem, part_size in zip(problems, self._split(geometry, block, size), strict=True):
            solved = self._solve(problem, self._rule(geometry, block), part_size)
            factors, entries = _stored(problem, solved)
            tensors |= {f"{group.name}.tucker.{name}": tensor for name, tensor in factors.items()}
            form |= {"sparse": solved.choice.count is not None} | _form(problem.layout, solved.choice) | entries
            report |= _report(problem, solved, sum(entries.values()))
        return Solution(tensors, dict.fromkeys(group.roles, FormSpec(**form)), report)

    @property
    def _own_output(self) -> bool:
        """Return True if o is decomposed by itself, because its input differs from that of q, k and v."""
        return self.entry.weighting == "input"

    def _rule(self, geometry: LayerGeometry, block: Block) -> Rule:
        multiple = self.entry.multiple(geometry.hidden)
        # Attention's d × d is small, and its core can be pruned instead.
        wide = isinstance(block, MLPBlock) or not self.entry.prune
        return Rule(self.entry.ranks, self.entry.prune, not self._own_output, wide, multiple)

    def _layouts(self, geometry: LayerGeometry, block: Block) -> list[Layout]:
        D, bits = geometry.hidden, geometry.bits
        if isinstance(block, MLPBlock):
            return [Layout(Part(D, block.width, ((len(block.matrices), 1),), bits), ("",))]
        attention = geometry.attention
        d, H, G, own = attention.head_dim, attention.heads, attention.kv_heads, self._own_output
        if H == G:
            layouts = [Layout(Part(D, d, ((3 if own else 4, H),), bits), ("",))]
        else:
            layouts = [Layout(Part(D, d, ((1 if own else 2, H), (2, G)), bits), ("_q" if own else "_qo", "_kv"))]
        return [*layouts, Layout(Part(D, d, ((1, H),), bits), ("_o",), "_o")] if own else layouts

    def _dense(self, geometry: LayerGeometry, block: Block) -> int:
        """Count the numbers of the weights."""
        return sum(layout.part.dense for layout in self._layouts(geometry, block))

    def _bounds(self, geometry: LayerGeometry, block: Block) -> tuple[int, int]:
        """Return the smallest size that can be stored, and the largest useful one."""
        rule, parts = self._rule(geometry, block), [layout.part for layout in self._layouts(geometry, block)]
        dense = sum(part.dense for part in parts)
        return min(sum(rule.least(part) for part in parts), dense), min(sum(rule.most(part) for part in parts), dense)

    def _split(self, geometry: LayerGeometry, block: Block, size: int) -> list[int]:
        """Divide a size among the problems of a group by their dense numbers."""
        rule, parts = self._rule(geometry, block), [layout.part for layout in self._layouts(geometry, block)]
        size = max(size, self._bounds(geometry, block)[0])
        if len(parts) == 1:
            return [size]
        first, last = parts
        share = round(size * first.dense / (first.dense + last.dense))
        share = max(rule.least(first), min(share, size - rule.least(last)))
        return [share, size - share]

    def _check(self, geometry: LayerGeometry, block: Block) -> None:
        if self.entry.ranks is None:
            return
        parts = [layout.part for layout in self._layouts(geometry, block)]
        limits = tuple(max(part.full[mode] for part in parts) for mode in range(3))
        ranks = list(self.entry.ranks)
        if any(rank > limit for rank, limit in zip(ranks, limits, strict=True)):
            raise ValueError(f"ranks: {ranks} for {block.name}; this model allows up to {list(limits)}")
        stored, dense = self._bounds(geometry, block)[0], self._dense(geometry, block)
        if stored >= dense:
            core = "with one core entry" if self.entry.prune else "and a dense core"
            raise ValueError(f"ranks: {ranks} {core} store {stored:,} numbers, no fewer than the weights' {dense:,}")

    def _problems(
        self, block: Block, geometry: LayerGeometry, weights: Mapping[str, Tensor], moments: Mapping[Moment, Tensor]
    ) -> list[Problem]:
        parts, scales = equalize([weights[matrix.weight_key] for matrix in block.matrices])
        layouts = self._layouts(geometry, block)
        if isinstance(block, MLPBlock):
            return [Problem(layouts[0], stack_mlp(parts[:-1], parts[-1]), parts=(tuple(scales),))]
        query, key, value, output = parts
        attention = geometry.attention
        stacked = stack_attention(query, key, value, output, attention.heads, attention.kv_heads)
        q, k, v, o = scales
        by_core = ((q, k, v, o),) if len(stacked) == 1 else ((q, o), (k, v))
        if not self._own_output:
            return [Problem(layouts[0], stacked, parts=by_core)]
        last = stacked[0].shape[2] - 1  # q, k, v, o or q, o
        inputs = [stacked[0][:, :, :last], *stacked[1:]]
        input_DD, context_Hdd = moments[input_moment(attention.query)][0], moments[_context(attention)]
        return [
            replace(weighted_inputs(layouts[0], inputs, input_DD), parts=(by_core[0][:last], *by_core[1:])),
            replace(weighted_output(layouts[1], stacked[0][:, :, last:], context_Hdd), parts=((o,),)),
        ]

    def _whole(self, problem: Problem) -> Tucker:
        """Return the HOSVD at full rank. Its leading blocks give the energy that smaller ranks keep."""
        return shared_tucker(problem.tensors, problem.layout.part.full, 1, self.entry.tolerance)

    def _solve(self, problem: Problem, rule: Rule, size: int) -> Solved:
        """Run both stages at the ranks with the least predicted error.

        After refinement, the next larger R1 often has a smaller error of the weights, at twice the work. On
        `wiki-llama-mha-6m` it raises the perplexity as often as it lowers it, so it is not tried.
        """
        part = problem.layout.part
        if rule.ranks is not None:
            rule = replace(rule, ranks=_cut(rule.ranks, part))
        options = list(choices(part, rule, size))
        choice = options[0] if len(options) == 1 else best_choice(options, _squares(self._whole(problem))[0])
        sweeps, tolerance = self.entry.sweeps, self.entry.tolerance
        tucker = whole = shared_tucker(problem.tensors, choice.ranks, sweeps, tolerance)
        if choice.count is not None:
            tucker = refine_sparse(problem.tensors, whole, choice.count, self.entry.refine_sweeps, tolerance)
        return Solved(choice, tucker, whole.energies)


def _context(block: AttentionBlock) -> Moment:
    return Moment(block.writer.reads, heads=block.heads, groups=block.heads)


def _cost(least: int, cap: int, biases: int) -> Any:
    return lambda size: biases + min(max(size, least), cap)


def _cut(ranks: Ranks3, part: Part) -> Ranks3:
    """Limit R3, which applies to q, k, v and o together, to the number of projections in a problem."""
    return ranks[0], ranks[1], min(ranks[2], part.full[2])


def _squares(whole: Tucker) -> tuple[list[Tensor], int]:
    """Return (g / 2^e)² in float32, precise enough to choose sizes, and e. e is 0 if the squares fit into float32."""
    exponent = math.frexp(max(float(core.abs().max()) for core in whole.cores))[1]
    exponent = 0 if abs(exponent) <= SAFE_EXPONENT else exponent
    return [(core * 2.0**-exponent).square().to(torch.float32) for core in whole.cores], exponent


def _stored(problem: Problem, solved: Solved) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Map names to the tensors of a solved problem, and `nnz` names to the core entries for its form."""
    layout, choice, tucker = problem.layout, solved.choice, solved.tucker
    first, second = tucker.first, tucker.second
    if problem.rows is not None:
        first = problem.rows.inverse @ first
    if problem.columns is not None:
        second = problem.columns.inverse @ second
    tensors = {f"first{layout.own}": first, f"second{layout.own}": second}
    entries = {}
    for suffix, third, core, parts in zip(layout.cores, tucker.thirds, tucker.cores, problem.parts, strict=True):
        third = third * third.new_tensor(parts)[:, None]
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


def _form(layout: Layout, choice: Choice) -> dict[str, Any]:
    return {"ranks_o": list(choice.ranks[:2])} if layout.own else {"ranks": list(choice.ranks)}


def _report(problem: Problem, solved: Solved, entries: int) -> dict[str, Any]:
    """Return the relative squared error (of weighted weights, if there is a weighting), ranks, stored numbers,
    energies.

    `energies` are shares of the whole: after each sweep of Stage I, and `pruned` after the first cut of Stage II.
    """
    part, end, choice, tucker = problem.layout.part, problem.layout.own, solved.choice, solved.tucker
    total = tucker.total or 1.0
    pruned = {} if choice.count is None else {f"pruned{end}": tucker.energies[0] / total}
    core = sum(part.positions(choice.ranks)) if choice.count is None else entries
    index = 0 if choice.count is None else part.index(choice.ranks)
    clipped: Sequence[InputRoots] = [roots for roots in (problem.rows, problem.columns) if roots is not None]
    return {
        f"error{end}": tucker.error / total,
        f"tucker_ranks{end}": list(choice.ranks),
        f"core{end}": core,
        f"numbers{end}": part.factors(choice.ranks) + index + core,
        f"numbers_without_index{end}": part.factors(choice.ranks) + core,
        f"energies{end}": [round(energy / total, 6) for energy in solved.energies],
        **pruned,
        **{f"clipped{end}": roots.clipped for roots in clipped},
        **{f"{name}{end}": scales for name, scales in scale_report(sum(problem.parts, ())).items()},
    }
