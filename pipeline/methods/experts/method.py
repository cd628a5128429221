"""Methods that keep some experts of each mixture, at one width. docs/methods.md#mixtures.

Legend: E experts of a layer, D hidden, N channels of an expert.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.deferred import DeferredTensors
from pipeline.kernels.mixture_refit import SWEEPS
from pipeline.methods.base import E, Group, Method, Visits
from pipeline.methods.experts.mixture import Mixture
from pipeline.methods.experts.scores import TOKENS_BY_EXPERT, expert_counts, kept_experts
from pipeline.methods.experts.shapes import EXPERTS, WIDTH
from pipeline.methods.experts.solutions import inputs_of, metric_of, mixture_from, rule_of, sample_of, solve
from pipeline.methods.method import Moment, Ranks, Solution, Statistics, Weights
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.methods.work import Work, is_narrow, mlp_fit, spectra

ROUTER, ROUTER_BIAS = "router", "router_bias"
LEAST_SAMPLE = 65_536  # tokens, if the text has that many
SAMPLE_TOKENS = 4  # per channel of an expert, if routing is even


class Experts(Group[E]):
    """The routed experts of a layer, with their router, of which some are kept."""

    scored_by: ClassVar[str]  # the key of the scores in the report

    @property
    def routed(self) -> tuple[MLPBlock, ...]:
        """Return the experts' blocks."""
        return self.geometry.experts

    @property
    def rule(self) -> dict[str, Any]:
        """Return the router's fields."""
        return dict(self.geometry.routing)

    def numbers(self, count: float, width: float) -> float:
        """Count the numbers stored for `count` experts of a width and their rows of the router."""
        bias = (ROUTER_BIAS in self.geometry.roles) + ("bias" in self.geometry.role_shapes(ROUTER))
        return count * (self.routed[0].numbers(width) + self.geometry.hidden + bias)

    @property
    def counts(self) -> list[int]:
        """Return the allowed numbers of experts, ascending."""
        rule = self.rule
        groups, top_groups = rule["groups"], rule["top_groups"]
        most = expert_counts(len(self.routed), rule["top_k"], groups)
        least = groups * max(1, 2 if rule["group_score"] == "top2" and groups > 1 else 1)
        return [count for count in most if count >= least and count // groups * top_groups >= rule["top_k"]]

    @property
    @abstractmethod
    def refits(self) -> bool:
        """Return True if the writers of the kept experts are fitted to the output of all experts."""

    @abstractmethod
    def expert_scores(self, mixture: Mixture) -> Tensor:
        """Return a score of each expert (E,); the experts with the highest scores are kept."""

    def solve(self, ranks: Ranks) -> Solution:
        """Keep the experts with the highest scores, in their order, renumbered from 0.

        The report has the sampled tokens of each dense expert and, under the key `scored_by`, its score.
        """
        experts, mixture = self.routed, self.mixture
        width = ranks.get(WIDTH, experts[0].width)
        if ranks[EXPERTS] == len(experts) and width == experts[0].width:
            return self.unchanged()
        scores_E = self.expert_scores(mixture)
        kept = kept_experts(scores_E, ranks[EXPERTS], mixture.rule.groups).tolist()
        solution = solve(experts, mixture, self.statistics, sampled(self.geometry), kept, width, self.refits)
        figures = tokens_of_experts(mixture, self.inputs, self.statistics) | {self.scored_by: scores_E.tolist()}
        return renumbered(replace(solution, report=solution.report | figures), self.geometry, kept, self.weights)

    def unchanged(self) -> Solution:
        """Return the weights, and the moments by which they may be rounded."""
        return Solution(self.weights, {}, {"dense": True}, inputs_of(self.routed, self.mixture, self.inputs))

    @property
    def mixture(self) -> Mixture:
        """Return the mixture, whose experts are read on access."""
        return mixture_of(self.geometry, self.weights)

    @property
    def inputs(self) -> Tensor:
        """Return the sampled inputs of the mixture (T, D)."""
        return self.statistics.moments[self.moments[0]][0]

    def visits(self, tokens: int) -> Visits:
        """Return how often each expert is read: for its score, to narrow and store it, twice to compare it with the
        dense expert whose number it gets, for a refit also to compute the target, and in each sweep."""
        return Visits(0, 5 + self.refits * (1 + SWEEPS))

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the fit of one expert on the sample, and the metric of the mixture's output."""
        fit = mlp_fit(self.routed[0], min(self.moments[0].tokens, tokens))
        return fit if is_narrow(self.routed[0]) else fit + spectra(self.moments[1:], self.geometry)


@dataclass(frozen=True)
class ExpertsMethod(Method[E]):
    """Base class of methods that prune or merge the routed experts of a layer, with their router."""

    by_loss: ClassVar[bool] = False

    @property
    @abstractmethod
    def kind(self) -> Callable[..., Experts[Any]]:
        """Return the class of the groups of experts."""

    @property
    def claims_experts(self) -> bool:
        """Return True unless the entry leaves out the experts."""
        return True

    def claims(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Return the groups of every chosen layer. Raises ValueError if none has a mixture.

        Routers belong to their experts, so `routed_only` keeps them.
        """
        layers = self.chosen_layers(geometry)
        if self.claims_experts and not any(layer.routing for layer in layers):
            raise ValueError("no chosen layer has a mixture of experts")
        return tuple(group for layer in layers for group in self.groups(layer))

    def groups(self, layer: LayerGeometry) -> Iterator[Group[Any]]:
        """Claim the experts, if the layer has a mixture."""
        if (experts := self.experts(layer)) is not None:
            yield experts

    def experts(self, layer: LayerGeometry) -> Experts[Any] | None:
        """Return the group of a layer's experts, or None."""
        if not (self.claims_experts and layer.routing):
            return None
        own = tuple(role for role in (ROUTER, ROUTER_BIAS) if role in layer.roles)
        roles = tuple(role for block in layer.experts for role in block.roles)
        return self.kind(self.entry, layer, EXPERTS, (*roles, *own), self._moments(layer))

    def _moments(self, layer: LayerGeometry) -> tuple[Moment, ...]:
        """Return the sample of the mixture's inputs and, with `by_loss`, the gradient's moment at its output."""
        sample = sample_of(layer.experts, sampled(layer))
        return (sample, metric_of(layer.experts)) if self.by_loss else (sample,)

    def least_reason(self, geometry: Geometry) -> str:
        """Explain the smallest number of experts, for the layer whose router chooses the most."""
        groups = [group for layer in self.chosen_layers(geometry) if (group := self.experts(layer)) is not None]
        if not groups:
            return ""
        group = max(groups, key=lambda group: group.counts[0])
        rule, count = group.rule, len(group.routed)
        parts = f" in {rule['groups']} equal groups" if rule["groups"] > 1 else ""
        return f"a router that chooses {rule['top_k']} experts{parts} leaves {group.counts[0]} of {count} or more"


def tokens_of_experts(mixture: Mixture, inputs_TD: Tensor, statistics: Statistics) -> dict[str, Any]:
    """Return figures of a report: the sampled tokens of each dense expert, of several sources also by source."""
    routing, by_source = mixture.route(inputs_TD), dict[str, list[int]]()
    for number in range(len(mixture.experts)):
        passed_T = (routing.experts == number).any(dim=1)
        for source, tokens in statistics.sources.count(passed_T).items():
            by_source.setdefault(source, []).append(tokens)
    figures: dict[str, Any] = {TOKENS_BY_EXPERT: routing.tokens(len(mixture.experts)).tolist()}
    return figures | ({BY_SOURCE: by_source} if by_source else {})


def sampled(layer: LayerGeometry) -> int:
    """Return the number of tokens to sample."""
    experts, rule = layer.experts, dict(layer.routing)
    return max(LEAST_SAMPLE, SAMPLE_TOKENS * experts[0].width * len(experts) // int(rule["top_k"]))


def mixture_of(layer: LayerGeometry, weights: Mapping[str, Tensor]) -> Mixture:
    """Return the mixture of a layer."""
    return mixture_from(layer.experts, weights, rule_of(dict(layer.routing)))


def renumbered(solution: Solution, layer: LayerGeometry, kept: Sequence[int], weights: Weights) -> Solution:
    """Renumber the kept experts from 0, and name the router's tensors as the layer does."""
    experts = layer.experts
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
