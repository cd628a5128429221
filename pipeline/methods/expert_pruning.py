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
from pipeline.methods.capabilities import Visits
from pipeline.methods.experts.merging import busiest, cluster, mean_outputs, merge, refit
from pipeline.methods.experts.method import (
    ExpertsMethod,
    mixture_of,
    renumbered,
    routed,
    sampled,
    tokens_of_experts,
)
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
    """`method: reap`: keeps the experts with the largest mean of p‖f(m)‖ over their tokens, as many in each layer."""

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
        """Return `ratio` times the number of experts."""
        return {variable.key: ratio * variable.cap for variable in self.rank_variables(geometry)}

    def expert_scores(
        self, mixture: Mixture, inputs_TD: Tensor, layer: LayerGeometry, statistics: Statistics
    ) -> Tensor:
        """Return the scores of experts from their sums over the sample."""
        return self.score(expert_sums(mixture, inputs_TD))

    def score(self, sums: ExpertSums) -> Tensor:
        """Return the mean of p‖f(m)‖ of each expert."""
        return reap_scores(sums)


@dataclass(frozen=True)
class FrequencyMethod(REAPMethod):
    """`method: frequency`: keeps the experts with the most tokens, as many in each layer."""

    name: ClassVar[str] = "frequency"
    scored_by: ClassVar[str] = TOKENS_BY_EXPERT

    def score(self, sums: ExpertSums) -> Tensor:
        """Return the number of tokens of each expert."""
        return frequency_scores(sums)


@dataclass(frozen=True)
class MergeExpertsMethod(REAPMethod):
    """`method: merge_experts`: merges the experts with the closest mean outputs, to as many in each layer."""

    name: ClassVar[str] = "merge_experts"

    def visits(self, layer: LayerGeometry, tokens: int) -> Visits:
        """Return how often each expert is read: for its mean output, to merge it, twice to compare it with a dense
        expert, and for the target of a refit. Merged experts are not read from the source."""
        return Visits(0, 4 + self.refits)

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Merge clusters of experts. The router keeps the row of each cluster's member with the most tokens."""
        experts, mixture = routed(geometry), mixture_of(geometry, weights)
        if ranks[EXPERTS] == len(experts):
            return self.unchanged(geometry, weights, statistics)
        inputs_TD = self.inputs(geometry, statistics)
        clusters = cluster(mean_outputs(mixture, inputs_TD), ranks[EXPERTS], mixture.rule.groups)
        tokens_E = expert_tokens(mixture, inputs_TD)
        merged, kept = merge(mixture, clusters, tokens_E, statistics.offload), busiest(clusters, tokens_E)
        if self.refits:
            merged = refit(mixture, merged, inputs_TD, statistics.offload)
        stored = {number: partial(mixture.experts.__getitem__, number) for number in range(len(experts))}
        stored |= {number: partial(merged.experts.__getitem__, place) for place, number in enumerate(kept)}
        placed = replace(mixture, experts=Deferred([stored[number] for number in range(len(experts))]))
        solution = solve(experts, placed, statistics, sampled(geometry), kept, experts[0].width, refit=False)
        report = {**solution.report, "clusters": clusters, **tokens_of_experts(mixture, inputs_TD, statistics)}
        return renumbered(replace(solution, report=report), geometry, kept, weights)
