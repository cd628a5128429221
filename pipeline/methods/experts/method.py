"""Methods that keep some experts of each mixture, at one width. docs/methods.md#mixtures.

Legend: E experts of a layer, D hidden, N channels of an expert.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import MLPBlock, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.deferred import DeferredTensors, in_memory
from pipeline.kernels.mixture_refit import SWEEPS
from pipeline.methods.base import E, Group, Method, Visits
from pipeline.methods.experts.mixture import (
    ROUTER,
    ROUTER_BIAS,
    MixtureSample,
    SolvedExpert,
    change_loss,
    mixture_of,
    narrowed,
    solve_shape,
)
from pipeline.methods.experts.scores import TOKENS_BY_EXPERT, few_tokens, kept_experts
from pipeline.methods.method import Moment, Ranks, Solution
from pipeline.methods.moments import factored_mean, output_gradient
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.methods.work import Work, is_narrow, mlp_fit, spectra

EXPERTS, WIDTH = "experts", "width"  # the ranks of a shape
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
        """Return the allowed numbers of experts, ascending; the last is the dense number.

        Each is a multiple of the number of the router's groups. The groups that it chooses have at least `top_k`
        experts together. A group whose score is the sum of two experts' has at least two.
        """
        rule, whole = self.rule, len(self.routed)
        groups, top_k = rule["groups"], rule["top_k"]
        least = groups * max(-(-top_k // groups), 2 if rule["group_score"] == "top2" and groups > 1 else 1)
        counts = sorted({*range(least, whole, groups), whole})
        return [count for count in counts if count // groups * rule["top_groups"] >= top_k]

    @property
    @abstractmethod
    def refits(self) -> bool:
        """Return True if the writers of the kept experts are fitted to the output of all experts."""

    @abstractmethod
    def expert_scores(self) -> Tensor:
        """Return a score of each expert (E,); the experts with the highest scores are kept."""

    def solve(self, ranks: Ranks) -> Solution:
        """Keep the experts with the highest scores, in their order.

        The report has the sampled tokens of each dense expert and, under the key `scored_by`, its score.
        """
        whole = self.routed[0].width
        width = ranks.get(WIDTH, whole)
        if ranks[EXPERTS] == len(self.routed) and width == whole:
            return self.unchanged()
        scores_E = self.expert_scores()
        kept = kept_experts(scores_E, ranks[EXPERTS], self.rule["groups"]).tolist()
        figures = self.tokens_of_experts() | {self.scored_by: scores_E.tolist()}
        return self.keep(self.sample, kept, width, self.refits, figures)

    def keep(
        self, sample: MixtureSample, kept: Sequence[int], width: int, refit: bool, figures: dict[str, Any]
    ) -> Solution:
        """Keep some experts at one width, renumbered from 0, with their rows of the router.

        The report names the kept experts, those without sampled tokens and those with few, and has the predicted `loss`
        after a refit, if the gradient's moment is among the statistics, and `figures`.
        """
        experts, metric = self.routed, None
        if (gradient := output_gradient(experts[0].writer)) in self.statistics.moments:
            metric = factored_mean(self.statistics, gradient)
        solved, change_TD = solve_shape(sample, metric, kept, width, refit, self.statistics.offload)
        tensors: dict[str, Callable[[], Tensor]] = {}
        forms: dict[str, FormSpec] = {}
        for block, number, each in zip(experts, kept, solved, strict=False):
            tensors |= _tensors(block, each)
            if width < experts[number].width:
                forms |= dict.fromkeys(block.roles, FormSpec(form="pruned", rank=width))
        router = sample.mixture.subset(kept)
        bias_key = next((key for key in self.weights if key.startswith(f"{ROUTER_BIAS}.")), ROUTER_BIAS)
        rows = {f"{ROUTER}.weight": router.router, bias_key: router.bias, f"{ROUTER}.bias": router.logit_bias}
        tensors |= {key: in_memory(tensor) for key, tensor in rows.items() if tensor is not None}
        if len(kept) < len(experts):
            forms[ROUTER] = FormSpec(form="experts", rank=len(kept))
        tokens = {experts[number]: each.tokens for number, each in zip(kept, solved, strict=True)}
        few = {block.name: count for block, count in tokens.items() if few_tokens(count, block.width)}
        unseen = [block.name for block, count in tokens.items() if not count]
        report: dict[str, Any] = {"experts": list(kept), "width": width, "unseen": unseen, "few_tokens": few}
        if metric is not None and change_TD is not None:
            report["loss"] = change_loss(change_TD, metric)
        inputs = self.inputs_of(narrowed(sample, kept, solved))
        return Solution(DeferredTensors(tensors), forms, report | figures, inputs)

    def unchanged(self) -> Solution:
        """Return the weights, and the moments by which they may be rounded."""
        return Solution(self.weights, {}, {"dense": True}, self.inputs_of(self.sample))

    def inputs_of(self, sample: MixtureSample) -> dict[str, Callable[[], Tensor]]:
        """Map the matrices whose inputs are an expert's own to functions that compute their moments on the sample.

        They are the writers, and the readers of experts whose inputs the router's weights multiply. `sample`: of the
        first experts of the layer, with new weights.
        """
        inputs: dict[str, Callable[[], Tensor]] = {}
        for number, block in enumerate(self.routed[: len(sample.mixture.experts)]):
            inputs[block.writer.role] = partial(sample.channel_moment, number)
            if block.weighed:
                inputs |= dict.fromkeys(roles_of(block.readers), partial(sample.reader_moment, number))
        return inputs

    def tokens_of_experts(self) -> dict[str, Any]:
        """Return figures of a report: the sampled tokens of each expert, of several sources also by source."""
        by_source: dict[str, list[int]] = {}
        for number in range(len(self.routed)):
            passed_T = (self.sample.routing.experts == number).any(dim=1)
            for source, tokens in self.statistics.sources.count(passed_T).items():
                by_source.setdefault(source, []).append(tokens)
        figures: dict[str, Any] = {TOKENS_BY_EXPERT: self.sample.tokens.tolist()}
        return figures | ({BY_SOURCE: by_source} if by_source else {})

    @cached_property
    def sample(self) -> MixtureSample:
        """Return the mixture, whose experts are read on access, on the sampled inputs."""
        return mixture_of(self.geometry, self.weights).on(self.statistics.moments[self.moments[0]][0])

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

    by_loss: ClassVar[bool] = False  # groups need the gradient's moment at the mixture's output

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
        gradient = (output_gradient(layer.experts[0].writer),) if self.by_loss else ()
        return self.kind(self.entry, layer, EXPERTS, (*roles, *own), (sample_of(layer), *gradient))

    def least_reason(self, geometry: Geometry) -> str:
        """Explain the smallest number of experts, for the layer whose router chooses the most."""
        groups = [group for layer in self.chosen_layers(geometry) if (group := self.experts(layer)) is not None]
        if not groups:
            return ""
        group = max(groups, key=lambda group: group.counts[0])
        rule, count = group.rule, len(group.routed)
        parts = f" in {rule['groups']} equal groups" if rule["groups"] > 1 else ""
        return f"a router that chooses {rule['top_k']} experts{parts} leaves {group.counts[0]} of {count} or more"


def sample_of(layer: LayerGeometry) -> Moment:
    """Return the sample of the inputs of a layer's mixture, (1, T, D)."""
    experts, rule = layer.experts, dict(layer.routing)
    tokens = max(LEAST_SAMPLE, SAMPLE_TOKENS * experts[0].width * len(experts) // int(rule["top_k"]))
    return Moment(experts[0].passing, kind="sample", tokens=tokens)


def _tensors(block: MLPBlock, solved: SolvedExpert) -> dict[str, Callable[[], Tensor]]:
    """Map the keys of an expert's tensors to functions that compute its new ones."""
    tensors: dict[str, Callable[[], Tensor]] = {}
    for place, matrix in enumerate(block.matrices):
        tensors[matrix.weight_key] = partial(_weight, solved, place)
        if matrix.bias:
            tensors[matrix.bias_key] = partial(_bias, solved, place)
    return tensors


def _weight(solved: SolvedExpert, place: int) -> Tensor:
    weights = solved.weights
    return (*weights.readers, weights.writer)[place]


def _bias(solved: SolvedExpert, place: int) -> Tensor:
    biases = solved.weights.biases
    assert biases is not None
    return biases[place]
