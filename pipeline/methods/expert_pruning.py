"""Baselines that reduce the number of experts: `reap`, `frequency` and `merge_experts`. docs/methods.md#mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from manifests.methods import REAP, Frequency, MergeExperts
from pipeline.methods.base import Visits
from pipeline.methods.experts.merging import busiest, cluster, mean_outputs, merge, refit
from pipeline.methods.experts.method import EXPERTS, Experts, ExpertsMethod
from pipeline.methods.experts.scores import SALIENCY_BY_EXPERT, TOKENS_BY_EXPERT
from pipeline.methods.method import Ranks, Solution
from pipeline.ranks.budget import RankVariable

Entry = REAP | Frequency | MergeExperts


class Reap(Experts[Entry]):
    """The experts with the largest mean of p‖f(m)‖ over their tokens."""

    scored_by = SALIENCY_BY_EXPERT

    @property
    def refits(self) -> bool:
        """Return the entry's `refit`."""
        return self.entry.refit

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a number of experts."""
        experts = self.routed
        cost = partial(self.numbers, width=experts[0].width)
        return (RankVariable(self.layer, self.name, EXPERTS, len(experts), self.rule["groups"], cost, self.counts[0]),)

    def expert_scores(self) -> Tensor:
        """Return the mean of p‖f(m)‖ of each expert."""
        return self.sample.saliencies()


class MostFrequent(Reap):
    """The experts with the most tokens."""

    scored_by = TOKENS_BY_EXPERT

    def expert_scores(self) -> Tensor:
        """Return the number of sampled tokens of each expert."""
        return self.sample.tokens.double()


class Merged(Reap):
    """Experts that are merged with those of the closest mean outputs."""

    def visits(self, tokens: int) -> Visits:
        """Return how often each expert is read: for its mean output, to merge it, twice to compare it with a dense
        expert, and for the target of a refit. Merged experts are not read from the source."""
        return Visits(0, 4 + self.refits)

    def solve(self, ranks: Ranks) -> Solution:
        """Merge clusters of experts. The router keeps the row of each cluster's member with the most tokens."""
        experts, sample, offload = self.routed, self.sample, self.statistics.offload
        if ranks[EXPERTS] == len(experts):
            return self.unchanged()
        clusters = cluster(mean_outputs(sample), ranks[EXPERTS], self.rule["groups"])
        merged, kept = merge(sample.mixture, clusters, sample.tokens, offload), busiest(clusters, sample.tokens)
        if self.refits:
            merged = refit(sample, merged, offload)
        stored = [partial(sample.mixture.experts.__getitem__, number) for number in range(len(experts))]
        for place, number in enumerate(kept):
            stored[number] = partial(merged.experts.__getitem__, place)
        figures = {"clusters": clusters, **self.tokens_of_experts()}
        return self.keep(sample.with_experts(stored), kept, experts[0].width, refit=False, figures=figures)


@dataclass(frozen=True)
class REAPMethod(ExpertsMethod[Entry]):
    """`method: reap`: keeps as many experts in each layer."""

    name: ClassVar[str] = "reap"
    kind: ClassVar[type[Experts[Any]]] = Reap

    @property
    def uniform(self) -> bool:
        """Return True: all layers keep the same number of experts."""
        return True


@dataclass(frozen=True)
class FrequencyMethod(REAPMethod):
    """`method: frequency`."""

    name: ClassVar[str] = "frequency"
    kind: ClassVar[type[Experts[Any]]] = MostFrequent


@dataclass(frozen=True)
class MergeExpertsMethod(REAPMethod):
    """`method: merge_experts`."""

    name: ClassVar[str] = "merge_experts"
    kind: ClassVar[type[Experts[Any]]] = Merged
