"""Methods that keep some experts of each mixture, at one width. docs/methods.md#mixtures.

Legend: E experts of a layer, D hidden, N channels of an expert.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from manifests.method_entry import MethodEntry
from manifests.records import FormSpec
from pipeline.families.blocks import MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.deferred import DeferredTensors
from pipeline.kernels.mixture_refit import SWEEPS
from pipeline.methods.base import MethodBase
from pipeline.methods.capabilities import Visits
from pipeline.methods.experts.mixture import Mixture
from pipeline.methods.experts.scores import TOKENS_BY_EXPERT, expert_counts, kept_experts
from pipeline.methods.experts.shapes import EXPERTS, WIDTH
from pipeline.methods.experts.solutions import inputs_of, metric_of, mixture_from, rule_of, sample_of, solve
from pipeline.methods.method import Group, Moment, Ranks, Solution, Statistics, Weights
from pipeline.methods.text_sources import BY_SOURCE

ROUTER, ROUTER_BIAS = "router", "router_bias"
LEAST_SAMPLE = 65_536  # tokens, if the text has that many
SAMPLE_TOKENS = 4  # per channel of an expert, if routing is even
E_ = TypeVar("E_", bound=MethodEntry)


@dataclass(frozen=True)
class ExpertsMethod(MethodBase[E_]):
    """Base class of methods that prune or merge the routed experts of a layer, with their router."""

    by_loss: ClassVar[bool] = False
    scored_by: ClassVar[str]

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the claimed groups. Routers belong to their experts, so `routed_only` keeps them."""
        return self.claimable(geometry)

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim the experts of every chosen layer that has a mixture. Raises ValueError if none has."""
        layers = [layer for layer in self.chosen_layers(geometry) if layer.routing]
        if not layers:
            raise ValueError("no chosen layer has a mixture of experts")
        return tuple(self._group(layer) for layer in layers)

    def _group(self, layer: LayerGeometry) -> Group:
        experts = routed(layer)
        own = tuple(role for role in (ROUTER, ROUTER_BIAS) if role in layer.roles)
        roles = tuple(role for block in experts for role in block.roles)
        return Group(layer.index, EXPERTS, (*roles, *own), self.moments(layer))

    def moments(self, layer: LayerGeometry) -> tuple[Moment, ...]:
        """Return the sample of the mixture's inputs and, with `by_loss`, the gradient's moment at its output."""
        sample = sample_of(routed(layer), sampled(layer))
        return (sample, metric_of(routed(layer))) if self.by_loss else (sample,)

    def numbers(self, layer: LayerGeometry, count: float, width: float) -> float:
        """Count the numbers stored for `count` experts of a width and their rows of the router."""
        bias = (ROUTER_BIAS in layer.roles) + ("bias" in layer.role_shapes(ROUTER))
        return count * (routed(layer)[0].numbers(width) + layer.hidden + bias)

    def counts(self, layer: LayerGeometry) -> list[int]:
        """Return the allowed numbers of experts, ascending."""
        rule = dict(layer.routing)
        groups, top_groups = rule["groups"], rule["top_groups"]
        most = expert_counts(len(routed(layer)), rule["top_k"], groups)
        least = groups * max(1, 2 if rule["group_score"] == "top2" and groups > 1 else 1)
        return [count for count in most if count >= least and count // groups * top_groups >= rule["top_k"]]

    def least_reason(self, geometry: Geometry) -> str:
        """Explain the smallest number of experts, for the layer whose router chooses the most."""
        layers = [geometry.layers[group.layer] for group in self.claims(geometry) if group.name == EXPERTS]
        if not layers:
            return ""
        layer = max(layers, key=lambda layer: self.counts(layer)[0])
        rule, least = dict(layer.routing), self.counts(layer)[0]
        groups = f" in {rule['groups']} equal groups" if rule["groups"] > 1 else ""
        return f"a router that chooses {rule['top_k']} experts{groups} leaves {least} of {len(routed(layer))} or more"

    def visits(self, layer: LayerGeometry, tokens: int) -> Visits:
        """Return how often each expert is read: for its score, to narrow and store it, twice to compare it with the
        dense expert whose number it gets, for a refit also to compute the target, and in each sweep."""
        return Visits(0, 5 + self.refits * (1 + SWEEPS))

    @abstractmethod
    def expert_scores(
        self, mixture: Mixture, inputs_TD: Tensor, layer: LayerGeometry, statistics: Statistics
    ) -> Tensor:
        """Return a score of each expert (E,); the experts with the highest scores are kept."""

    @property
    @abstractmethod
    def refits(self) -> bool:
        """Return True if the writers of the kept experts are fitted to the output of all experts."""

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Keep the experts with the highest scores, in their order, renumbered from 0.

        The report has the sampled tokens of each dense expert and, under the key `scored_by`, its score.
        """
        experts, mixture = routed(geometry), mixture_of(geometry, weights)
        width = ranks.get(WIDTH, experts[0].width)
        if ranks[EXPERTS] == len(experts) and width == experts[0].width:
            return self.unchanged(geometry, weights, statistics)
        inputs_TD = self.inputs(geometry, statistics)
        scores_E = self.expert_scores(mixture, inputs_TD, geometry, statistics)
        kept = kept_experts(scores_E, ranks[EXPERTS], mixture.rule.groups).tolist()
        solution = solve(experts, mixture, statistics, sampled(geometry), kept, width, self.refits)
        figures = tokens_of_experts(mixture, inputs_TD, statistics) | {self.scored_by: scores_E.tolist()}
        return renumbered(replace(solution, report=solution.report | figures), geometry, kept, weights)

    def unchanged(self, layer: LayerGeometry, weights: Weights, statistics: Statistics) -> Solution:
        """Return the weights, and the moments by which they may be rounded."""
        inputs = inputs_of(routed(layer), mixture_of(layer, weights), self.inputs(layer, statistics))
        return Solution(weights, {}, {"dense": True}, inputs)

    def inputs(self, layer: LayerGeometry, statistics: Statistics) -> Tensor:
        """Return the sampled inputs of the mixture (T, D)."""
        return statistics.moments[sample_of(routed(layer), sampled(layer))][0]


def tokens_of_experts(mixture: Mixture, inputs_TD: Tensor, statistics: Statistics) -> dict[str, Any]:
    """Return figures of a report: the sampled tokens of each dense expert, of several sources also by source."""
    routing, by_source = mixture.route(inputs_TD), dict[str, list[int]]()
    for number in range(len(mixture.experts)):
        passed_T = (routing.experts == number).any(dim=1)
        for source, tokens in statistics.sources.count(passed_T).items():
            by_source.setdefault(source, []).append(tokens)
    figures: dict[str, Any] = {TOKENS_BY_EXPERT: routing.tokens(len(mixture.experts)).tolist()}
    return figures | ({BY_SOURCE: by_source} if by_source else {})


def routed(layer: LayerGeometry) -> list[MLPBlock]:
    """Return the blocks of a layer's routed experts."""
    return [block for block in layer.mlps if block.roles[0] in layer.routed_roles]


def sampled(layer: LayerGeometry) -> int:
    """Return the number of tokens to sample."""
    experts, rule = routed(layer), dict(layer.routing)
    return max(LEAST_SAMPLE, SAMPLE_TOKENS * experts[0].width * len(experts) // int(rule["top_k"]))


def mixture_of(layer: LayerGeometry, weights: Mapping[str, Tensor]) -> Mixture:
    """Return the mixture of a layer."""
    return mixture_from(routed(layer), weights, rule_of(dict(layer.routing)))


def renumbered(solution: Solution, layer: LayerGeometry, kept: Sequence[int], weights: Weights) -> Solution:
    """Renumber the kept experts from 0, and name the router's tensors as the layer does."""
    experts = routed(layer)
    names: dict[str, str] = {}
    for place, number in enumerate(kept):
        names |= dict(zip(experts[number].roles, experts[place].roles, strict=True))

    def renamed(key: str) -> str:
        role = next((role for role in names if key == role or key.startswith(f"{role}.")), None)
        return key if role is None else names[role] + key.removeprefix(role)

    bias = next((key for key in weights if key.startswith(f"{ROUTER_BIAS}.")), "")
    tensors = DeferredTensors(
        {
            bias if key == ROUTER_BIAS else renamed(key): partial(solution.tensors.__getitem__, key)
            for key in solution.tensors
        }
    )
    forms = {renamed(role): form for role, form in solution.forms.items()}
    inputs = {renamed(role): moment for role, moment in solution.inputs.items()}
    if len(kept) < len(experts):
        forms[ROUTER] = FormSpec(form="experts", rank=len(kept))
    return replace(solution, tensors=tensors, forms=forms, inputs=inputs, outputs={})
