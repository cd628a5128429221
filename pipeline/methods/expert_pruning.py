"""Baselines that reduce the number of experts: `reap`, `frequency` and `merge_experts`. docs/methods.md#mixtures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from manifests.methods import REAP, Frequency, MergeExperts
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.deferred import Deferred
from pipeline.methods.experts.merging import busiest, cluster, mean_outputs, merge, refit
from pipeline.methods.experts.method import ExpertsMethod, mixture_of, renumbered, routed, sampled
from pipeline.methods.experts.mixture import Mixture, expert_sums, expert_tokens
from pipeline.methods.experts.scores import (
    SALIENCY_BY_EXPERT,
    TOKENS_BY_EXPERT,
    ExpertSums,
    frequency_scores,
    reap_scores,
)
from pipeline.methods.experts.shapes import EXPERTS
from pipeline.methods.experts.solutions import solve
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable


@dataclass(frozen=True)
class REAPMethod(ExpertsMethod[REAP | Frequency | MergeExperts]):
    """`method: reap`: experts by the mean of p‖f(m)‖ over their tokens, equally many in every layer."""

    name: ClassVar[str] = "reap"
    scored_by: ClassVar[str] = SALIENCY_BY_EXPERT

    @property
    def uniform(self) -> bool:
        """Return True: all layers keep the same number of experts."""
        return True

    @property
    def refits(self) -> bool:
        """Return the entry's `refit`."""
        return self.entry.refit

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose a number of experts."""
        experts, groups = routed(geometry), dict(geometry.routing)["groups"]
        cost, least = partial(self.numbers, geometry, width=experts[0].width), self.counts(geometry)[0]
        return (RankVariable(group.layer, group.name, EXPERTS, len(experts), groups, cost, least),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the ratio of E."""
        return {variable.key: ratio * variable.cap for variable in self.rank_variables(geometry)}

    def expert_scores(
        self, mixture: Mixture, inputs_TD: Tensor, layer: LayerGeometry, statistics: Statistics
    ) -> Tensor:
        """Return the score of each expert."""
        return self.score(expert_sums(mixture, inputs_TD))

    def score(self, sums: ExpertSums) -> Tensor:
        """Return a score for each expert."""
        return reap_scores(sums)


@dataclass(frozen=True)
class FrequencyMethod(REAPMethod):
    """`method: frequency`: experts by their number of tokens, equally many in every layer."""

    name: ClassVar[str] = "frequency"
    scored_by: ClassVar[str] = TOKENS_BY_EXPERT

    def score(self, sums: ExpertSums) -> Tensor:
        """Return the number of tokens of each expert."""
        return frequency_scores(sums)


@dataclass(frozen=True)
class MergeExpertsMethod(REAPMethod):
    """`method: merge_experts`: experts of nearest mean outputs become one, equally many stay in every layer."""

    name: ClassVar[str] = "merge_experts"

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Store each cluster in the place of its member with most tokens, under new numbers from 0."""
        experts, mixture = routed(geometry), mixture_of(geometry, weights)
        if ranks[EXPERTS] == len(experts):
            return Solution(weights, {}, {"dense": True})
        inputs_TD = self.inputs(geometry, statistics)
        clusters = cluster(mean_outputs(mixture, inputs_TD), ranks[EXPERTS], mixture.rule.groups)
        tokens_E = expert_tokens(mixture, inputs_TD)
        merged, kept = merge(mixture, clusters, tokens_E, statistics.aside), busiest(clusters, tokens_E)
        if self.refits:
            merged = refit(mixture, merged, inputs_TD, statistics.aside)
        stored = {number: partial(mixture.experts.__getitem__, number) for number in range(len(experts))}
        stored |= {number: partial(merged.experts.__getitem__, place) for place, number in enumerate(kept)}
        placed = replace(mixture, experts=Deferred([stored[number] for number in range(len(experts))]))
        solution = solve(experts, placed, statistics, sampled(geometry), kept, experts[0].width, refit=False)
        report = {**solution.report, "clusters": clusters, TOKENS_BY_EXPERT: tokens_E.tolist()}
        return renumbered(replace(solution, report=report), geometry, kept, weights)
