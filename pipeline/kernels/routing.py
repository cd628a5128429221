"""Choice of experts by a router, and the change if one expert is missing. docs/methods.md#mixtures.

Legend: T tokens, E experts, k experts of a token, G groups of experts, q outputs that the loss feels.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite
from pipeline.kernels.refit import evenly_spread

OTHERS = 4  # tokens of other experts, for each channel of an expert with few tokens
_TINY = 1e-20  # added to the sum that divides the weights, as in the models' own code


@dataclass(frozen=True)
class RoutingRule:
    """The rule by which logits choose and weigh experts.

    Attributes:
        scores: the function of the logits that gives scores.
        top_k: experts of a token.
        normalise: divide the weights of a token by their sum.
        scale: factor of all weights.
        groups: equal groups of neighbouring experts; a token chooses among the experts of its best `top_groups`.
        group_members: the number of a group's best experts whose scores add up to the group's score.
        weighs_inputs: a weight multiplies the inputs of an expert, not its outputs.
    """

    scores: Literal["softmax", "sigmoid"]
    top_k: int
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_members: int = 2
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        if min(self.top_k, self.groups, self.top_groups, self.group_members) < 1 or self.top_groups > self.groups:
            raise ValueError(f"a router cannot choose by {self}")
        if self.weighs_inputs and self.normalise:
            raise ValueError("weights that multiply inputs are not normalised: another choice would change outputs")


class Others(NamedTuple):
    """Tokens of other experts that stand for those that an expert with few tokens lacks. docs/methods.md#few-tokens.

    Attributes:
        tokens: (m,), ascending.
        weight: the routing weight that they would have: the root mean square of the weights of all choices.
        factor: of each one's channels, besides the weight, so that all m count as the lacking tokens.
        scale: of sums over own and lacking tokens, so that they count as the own ones, or as one if there are none.
    """

    tokens: Tensor
    weight: float
    factor: float
    scale: float

    def matched(self, own: float, values_mN: Tensor, passed: int) -> float:
        """Return the factor by which values on others get the mean square of `passed` own tokens, and of one other.

        `own`: the sum of the own tokens' squares. Experts with few tokens mostly get small weights.
        """
        other = float(values_mN.double().square().sum()) / len(values_mN) / self.factor**2
        return ((own + other) / ((passed + 1) * other)) ** 0.5 if other > 0.0 else 1.0


class Routing(NamedTuple):
    """The experts of each token (T, k), the best first, and their weights (T, k). A weight of 0 means no expert."""

    experts: Tensor
    weights: Tensor

    def dense(self, num_experts: int) -> Tensor:
        """Return the weights (T, E), 0 for experts that a token does not choose."""
        return self.weights.new_zeros(len(self.weights), num_experts).scatter(1, self.experts, self.weights)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the tokens (t,) that choose an expert, ascending, and its weights (t,) on them."""
        chosen_Tk = (self.experts == expert) & (self.weights != 0.0)
        return chosen_Tk.any(dim=1).nonzero()[:, 0], self.weights[chosen_Tk]

    def others(self, expert: int, width: int, passed: int) -> Others | None:
        """Return evenly spread tokens that do not choose an expert of `width` channels.

        Return None if as many tokens as it has channels `passed` it, or if all do.
        """
        own_T = ((self.experts == expert) & (self.weights != 0.0)).any(dim=1)
        rest_t = (~own_T).nonzero()[:, 0]
        if passed >= min(width, len(own_T)):
            return None
        if not len(rest_t):  # of equal scores, the model chose others than this rule does
            rest_t = torch.arange(len(own_T), device=own_T.device)
        tokens_m = rest_t[evenly_spread(0, len(rest_t), len(rest_t), OTHERS * width).to(rest_t.device)]
        chosen = self.weights[self.weights != 0.0].double()
        weight = float(chosen.square().mean().sqrt()) if len(chosen) else 0.0
        return Others(tokens_m, weight, ((width - passed) / len(tokens_m)) ** 0.5, max(1, passed) / width)

    def tokens(self, num_experts: int) -> Tensor:
        """Return the number of tokens (E,) that choose each expert."""
        return self.experts[self.weights != 0.0].bincount(minlength=num_experts)


class Removals(NamedTuple):
    """The `changes` (T, k, E) of routing weights if the j-th expert of a token, `experts` (T, k), is missing.

    The weight of the missing expert itself falls to 0.
    """

    experts: Tensor
    changes: Tensor


def route(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None = None, absent: Tensor | None = None) -> Routing:
    """Choose experts. Of equal scores, the lower index is chosen.

    Args:
        bias_E: added to the scores for the choice, but not for the weights.
        absent: (E,) or (T, E), True for experts without a row of the router: they take no part in a softmax. If fewer
            than k experts are left, the missing choices get a weight of 0.

    Computes in float32, or in float64 if the logits are. Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    _check(logits_TE, rule, bias_E)
    scores_TE = _scores(logits_TE, rule, absent)
    if bias_E is not None:
        choice_TE = scores_TE + bias_E.to(scores_TE.dtype)
    else:  # sigmoids of large logits round to 1
        choice_TE = logits_TE if rule.scores == "sigmoid" and rule.groups == 1 else scores_TE
    if absent is not None:
        choice_TE = choice_TE.masked_fill(absent, float("-inf"))
    choice_TE = _within_groups(choice_TE, rule)
    best_Tk = choice_TE.sort(dim=1, descending=True, stable=True)
    experts_Tk, chosen_Tk = best_Tk.indices[:, : rule.top_k], best_Tk.values[:, : rule.top_k]
    weights_Tk = scores_TE.gather(1, experts_Tk).masked_fill(chosen_Tk == float("-inf"), 0.0)
    if rule.normalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=1, keepdim=True) + _TINY)
    return Routing(experts_Tk, weights_Tk * rule.scale)


def removals(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None = None) -> Removals:
    """Route each token again without each of its experts in turn. Raises the ValueErrors of `route`.

    Tokens that do not choose an expert are left out, although a softmax without normalisation changes their weights a
    little, too.
    """
    now = route(logits_TE, rule, bias_E)
    num_experts = logits_TE.shape[1]
    before_TE, changes = now.dense(num_experts), []
    for place in range(now.experts.shape[1]):
        absent_TE = torch.zeros_like(before_TE, dtype=torch.bool).scatter_(1, now.experts[:, place, None], True)
        changes.append(route(logits_TE, rule, bias_E, absent_TE).dense(num_experts) - before_TE)
    return Removals(now.experts, torch.stack(changes, dim=1))


def add_change_(into_Tkq: Tensor, changes_Tk: Tensor, weighted_Tq: Tensor) -> None:
    """Add one expert's part to the changes of a mixture's output: its `changes` of weight, times its weighted outputs.

    `weighted_Tq` is f(m) R for the expert f, where R Rᵀ is the loss's metric G at the mixture's output. It may be zero
    for tokens without `changes_Tk`. Raises ValueError on shapes that do not fit.
    """
    if into_Tkq.shape != (*changes_Tk.shape, weighted_Tq.shape[-1]) or len(weighted_Tq) != len(changes_Tk):
        shapes = f"{tuple(into_Tkq.shape)}, {tuple(changes_Tk.shape)} and {tuple(weighted_Tq.shape)}"
        raise ValueError(f"changes (T, k, q), weights (T, k) and outputs (T, q) do not fit: {shapes}")
    into_Tkq += changes_Tk[:, :, None].to(into_Tkq.dtype) * weighted_Tq[:, None, :].to(into_Tkq.dtype)


def removal_sums(experts_Tk: Tensor, changes_Tkq: Tensor, num_experts: int) -> Tensor:
    """Return ½ Σ δᵀ G δ (E,), float64, over the tokens of each expert; δ the change of the output without it.

    `changes_Tkq` are the complete sums of `add_change_`. Divided by the number of all tokens, it is the predicted loss
    of the expert's removal in nats per token. Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    if changes_Tkq.shape[:2] != experts_Tk.shape:
        raise ValueError(f"experts {tuple(experts_Tk.shape)} and changes {tuple(changes_Tkq.shape)} do not fit")
    require_finite("changes", changes_Tkq)
    squares_Tk = 0.5 * changes_Tkq.to(torch.float64).square().sum(dim=2)
    return squares_Tk.new_zeros(num_experts).index_add_(0, experts_Tk.flatten(), squares_Tk.flatten())


def _check(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> None:
    if logits_TE.ndim != 2 or logits_TE.shape[1] < rule.top_k:
        raise ValueError(f"logits {tuple(logits_TE.shape)} do not suffice for {rule.top_k} experts a token")
    num_experts = logits_TE.shape[1]
    if num_experts % rule.groups:
        raise ValueError(f"{num_experts} experts do not divide into {rule.groups} groups")
    if bias_E is not None and tuple(bias_E.shape) != (num_experts,):
        raise ValueError(f"bias {tuple(bias_E.shape)} and logits {tuple(logits_TE.shape)} do not fit")
    require_finite("logits", logits_TE)


def _scores(logits_TE: Tensor, rule: RoutingRule, absent: Tensor | None) -> Tensor:
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if absent is not None and rule.scores == "softmax":
        logits_TE = logits_TE.masked_fill(absent, float("-inf"))
    return logits_TE.softmax(dim=1) if rule.scores == "softmax" else logits_TE.sigmoid()


def _within_groups(choice_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Exclude the experts outside of the best groups."""
    if rule.groups == 1:
        return choice_TE
    by_group_TGn = choice_TE.unflatten(1, (rule.groups, -1))
    members = min(rule.group_members, by_group_TGn.shape[2])
    scores_TG = by_group_TGn.sort(dim=2, descending=True).values[:, :, :members].sum(dim=2)
    best_TG = scores_TG.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_groups]
    outside_TG = torch.ones_like(scores_TG, dtype=torch.bool).scatter_(1, best_TG, False)
    inside_TE: Tensor = by_group_TGn.masked_fill(outside_TG[:, :, None], float("-inf")).flatten(1)
    return inside_TE
