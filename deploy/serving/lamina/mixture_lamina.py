# mypy: allow-untyped-calls
"""Mixtures of experts: their description in config.json, the router, and the roles of a layer with a mixture.

The config's `mixture` holds the common fields of all layers and, in `layers`, the sizes of each layer's mixture, or
null for a layer with a dense MLP. A routed expert has roles such as `experts.3.gate`, the shared expert `shared.gate`.

D hidden, E experts of a layer, T tokens, k experts of a token, g groups of experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization

from .block_lamina import MLP_ROLES

ROUTER, ROUTER_BIAS, SHARED_GATE, SHARED = "router", "router_bias", "shared_gate", "shared"
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
CHANNELS, INPUTS = WEIGHED = ("channels", "inputs")
# Fields of `mixture` and their defaults; those without one are required.
DEFAULTS: dict[str, Any] = {
    "shared": None,  # the path of the shared expert
    "shared_gate": None,  # the path of the linear whose sigmoid scales the shared expert
    "score": "softmax",
    "biases": False,  # the linears of routed experts have biases
    "logit_bias": False,  # the router's module has a bias of the logits
    "float_logits": False,  # logits are computed in float32, not in the model's dtype
    "score_bias": None,  # the path of numbers (E) that are added to the scores only for the choice of experts
    "renormalise": True,  # the weights of the chosen experts add up to 1, before `scale`
    "scale": 1.0,
    "weighs": "channels",  # a token's weight multiplies the channels of an expert, or its "inputs"
    "groups": 1,
    "top_groups": 1,  # the number of groups from which experts are chosen
    "group_score": "max",  # groups are ranked by their best expert, or by the sum of their best two
}
REQUIRED = ("router", "experts", "modules", "layers")
SIZES = ("experts", "width", "top_k")  # fields of a layer's mixture; with a shared expert also `shared_width`


@dataclass(frozen=True)
class LayerMixture:
    """The mixture of one layer.

    Attributes:
        experts: the number of experts. Each has `width` channels, and a token passes `top_k` of them.
        shared_width: the channels of the shared expert; 0 without one.
    """

    experts: int
    width: int
    top_k: int
    shared_width: int = 0

    def width_of(self, block: str) -> int:
        """Return the channels of the expert with this block name."""
        return self.shared_width if block == SHARED else self.width


def split_role(role: str) -> tuple[str, str]:
    """Split a role into block and rest: `experts.3.gate` → (`experts.3`, `gate`). Other roles have the block ""."""
    block, _, local = role.rpartition(".")
    return block, local


def mixture_of(mixture: Mapping[str, Any] | None, layer: int) -> LayerMixture | None:
    """Return the mixture of a layer; None for a layer with a dense MLP."""
    sizes = None if mixture is None else mixture["layers"][layer]
    return None if sizes is None else LayerMixture(**sizes)


def with_experts(mixture: Mapping[str, Any], sizes: LayerMixture, count: Any) -> LayerMixture:
    """Return a layer's mixture with `count` experts. Raises ValueError if its router cannot choose from that many."""
    if type(count) is not int or not 1 <= count <= sizes.experts:
        raise ValueError(f"keeps {count!r} of {sizes.experts} experts")
    fewer = {**asdict(sizes), "experts": count}
    if problem := _problem(mixture, fewer):
        raise ValueError(problem)
    return LayerMixture(**fewer)


def expert_blocks(sizes: LayerMixture) -> Iterator[str]:
    """Yield the names of the experts' blocks, the shared one last."""
    yield from (f"experts.{expert}" for expert in range(sizes.experts))
    if sizes.shared_width:
        yield SHARED


def layer_modules(
    modules: Mapping[str, str], mixture: Mapping[str, Any] | None, sizes: LayerMixture | None
) -> dict[str, str]:
    """Map the roles of a layer to their module paths; `modules`: those of a layer with a dense MLP."""
    if mixture is None or sizes is None:
        return dict(modules)
    paths = {role: path for role, path in modules.items() if role not in MLP_ROLES}
    paths[ROUTER] = mixture["router"]
    if mixture["score_bias"]:
        paths[ROUTER_BIAS] = mixture["score_bias"].rpartition(".")[0]
    for block in expert_blocks(sizes):
        paths |= {f"{block}.{role}": path for role, path in block_modules(mixture, block).items()}
    if sizes.shared_width and mixture["shared_gate"]:
        paths[SHARED_GATE] = mixture["shared_gate"]
    return paths


def block_modules(mixture: Mapping[str, Any], block: str) -> dict[str, str]:
    """Map `gate`, `up` and `down` of one expert, or of the shared one, to their module paths inside the layer."""
    parent = mixture["shared"] if block == SHARED else f"{mixture['experts']}.{block.rpartition('.')[2]}"
    names = mixture["modules"] if block != SHARED else mixture.get("shared_modules", mixture["modules"])
    return {role: f"{parent}.{name}" for role, name in names.items()}


def has_biases(mixture: Mapping[str, Any], block: str) -> bool:
    """Return True if the linears of this expert have biases."""
    return bool(mixture["biases"]) and block != SHARED


def check_mixture(mixture: Mapping[str, Any], layers: int) -> None:
    """Raise ValueError, naming the fault, unless `mixture` describes layers that can be built."""
    if missing := [name for name in REQUIRED if name not in mixture]:
        raise ValueError(f"mixture lacks {', '.join(missing)}")
    if unknown := sorted({*mixture} - {*REQUIRED, *DEFAULTS, "shared_modules"}):
        raise ValueError(f"mixture has unknown {', '.join(unknown)}; a newer lamina may know it")
    if {*mixture["modules"]} | {"gate"} != {*MLP_ROLES}:
        raise ValueError(f"mixture.modules has {sorted(mixture['modules'])}, needed are {', '.join(MLP_ROLES)}")
    for name, allowed in (("score", SCORES), ("group_score", GROUP_SCORES), ("weighs", WEIGHED)):
        if mixture.get(name, DEFAULTS[name]) not in allowed:
            raise ValueError(f"mixture.{name} is {mixture[name]!r}, allowed are {', '.join(allowed)}")
    if mixture.get("weighs") == INPUTS and (mixture.get("renormalise", True) or mixture.get("biases")):
        raise ValueError("mixture.weighs is 'inputs', which cannot be combined with renormalise or biases")
    if not isinstance(mixture["layers"], list) or len(mixture["layers"]) != layers:
        raise ValueError(f"mixture.layers is not a list of {layers} entries")
    for layer, sizes in enumerate(mixture["layers"]):
        if problem := _problem(mixture, sizes):
            raise ValueError(f"mixture.layers: layer {layer} {problem}")


def _problem(mixture: Mapping[str, Any], sizes: Any) -> str | None:
    """Describe the first fault in the sizes of a layer's mixture; None if there is none."""
    if sizes is None:
        return None
    if not isinstance(sizes, dict) or not {*SIZES} <= {*sizes} <= {*SIZES, "shared_width"}:
        return f"is {sizes!r}, needed are {', '.join(SIZES)}, and shared_width with a shared expert"
    if bad := [name for name, size in sizes.items() if type(size) is not int or size < (name != "shared_width")]:
        return f"has {bad[0]} {sizes[bad[0]]!r}, which is not a whole number from {int(bad[0] != 'shared_width')}"
    if sizes.get("shared_width", 0) and not mixture.get("shared"):
        return "has a shared expert, for which mixture.shared gives no path"
    experts, groups = sizes["experts"], mixture.get("groups", 1)
    top_groups = mixture.get("top_groups", 1)
    if not 1 <= top_groups <= groups or experts % groups:
        return f"has {experts} experts in {groups} groups, of which {top_groups} are chosen"
    if groups > 1 and mixture.get("group_score") == "top2" and experts // groups < 2:
        return f"has {experts // groups} experts in each of {groups} groups, which are ranked by their best two"
    if sizes["top_k"] > experts // groups * top_groups:
        return f"chooses {sizes['top_k']} of {experts // groups * top_groups} experts"
    return None


class Router(nn.Module):
    """Chooses the experts of each token: `weight` (E, D), and `bias` (E) of the logits or None."""

    bias: Tensor | None

    def __init__(self, mixture: Mapping[str, Any], hidden: int, sizes: LayerMixture) -> None:
        super().__init__()
        self.score, self.top_k = mixture["score"], sizes.top_k
        self.groups, self.top_groups = mixture["groups"], mixture["top_groups"]
        self.group_size = sizes.experts // self.groups
        self.by_best_two = mixture["group_score"] == "top2"
        self.renormalise, self.scale = mixture["renormalise"], mixture["scale"]
        self.float_logits = mixture["float_logits"]
        self.weight = nn.Parameter(torch.empty(sizes.experts, hidden))
        self.register_parameter("bias", nn.Parameter(torch.zeros(sizes.experts)) if mixture["logit_bias"] else None)

    def initialise_(self, std: float) -> None:
        """Fill the parameters at random."""
        for parameter in self.parameters(recurse=False):
            initialization.normal_(parameter, std=std)

    def forward(self, x_TD: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights (T, k), at least float32, and the indices (T, k) of each token's experts."""
        logits_TE = self.logits(x_TD)
        return self.select(self._score(logits_TE), bias_E, logits_TE)

    def select(
        self, scores_TE: Tensor, bias_E: Tensor | None, logits_TE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights (T, k) and the indices (T, k) of the experts of tokens with these scores.

        Sigmoids of large logits round to 1, so that without a bias the experts are chosen by `logits_TE`.
        """
        by_logits = logits_TE is not None and bias_E is None and self.score == "sigmoid" and self.groups == 1
        ranked_TE = logits_TE if by_logits and logits_TE is not None else scores_TE
        chosen_Tk = self.choose(ranked_TE.detach(), bias_E)
        weight_Tk = scores_TE.gather(1, chosen_Tk)
        if self.renormalise:
            total_T1 = weight_Tk.sum(dim=-1, keepdim=True)
            weight_Tk = weight_Tk / (total_T1 if self.score == "softmax" else total_T1 + 1e-20)
        return weight_Tk * self.scale, chosen_Tk

    def scores(self, x_TD: Tensor) -> Tensor:
        """Return the score of every expert (T, E), at least float32."""
        return self._score(self.logits(x_TD))

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logit of every expert (T, E), at least float32."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        inner = wide if self.float_logits else x_TD.dtype
        bias_E = None if self.bias is None else self.bias.to(inner)
        return nn.functional.linear(x_TD.to(inner), self.weight.to(inner), bias_E).to(wide)

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=-1)

    def choose(self, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return the indices (T, k) of the experts of tokens with these scores."""
        ranking_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.groups > 1:
            by_group_Tgs = ranking_TE.unflatten(1, (self.groups, self.group_size))
            best_Tg = by_group_Tgs.topk(2, dim=-1)[0].sum(-1) if self.by_best_two else by_group_Tgs.amax(dim=-1)
            kept_Tg = torch.zeros_like(best_Tg, dtype=torch.bool)
            kept_Tg.scatter_(1, best_Tg.topk(self.top_groups, dim=-1)[1], True)
            lowest = float("-inf") if self.score == "sigmoid" else 0.0
            ranking_TE = by_group_Tgs.masked_fill(~kept_Tg[..., None], lowest).flatten(1)
        return ranking_TE.topk(self.top_k, dim=-1)[1]


def passing(chosen_Tk: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert with tokens, ascending; its tokens, ascending; and its position among each token's experts.

    On the meta device, all tokens pass the first k experts.
    """
    if chosen_Tk.is_meta:
        token_T = torch.arange(len(chosen_Tk), device=chosen_Tk.device)
        yield from ((place, token_T, torch.full_like(token_T, place)) for place in range(chosen_Tk.shape[1]))
        return
    for expert in chosen_Tk.unique().tolist():
        yield expert, *(chosen_Tk == expert).nonzero(as_tuple=True)


Routing = tuple[Tensor, Tensor]  # weights (T, k) and indices (T, k) of each token's experts


class Mixing:
    """The mixture of a decoder layer, computed at once or in steps with streamed experts."""

    weighs_inputs = False
    every_expert = False  # every token also passes all experts, without effect on the output, for hooks
    parallel: bool
    attends: bool
    _names: dict[str, tuple[str, ...]]
    role: Callable[[str], nn.Module]
    written: Callable[[str, Tensor], Tensor]
    _normed: Callable[[str, Tensor], Tensor]
    _mlp: Callable[[Tensor, str, Tensor | None], Tensor]
    _attended: Callable[..., tuple[Tensor, Tensor]]
    _router_bias: Callable[[], Tensor | None]

    def has_role(self, role: str) -> bool:
        """Return True if the layer has a module of this role."""
        return role in self._names

    def _mixture(self, x_BTD: Tensor) -> Tensor:
        """Apply each token's experts, in ascending order, and the shared one.

        A token's weight scales the channels of an expert, or its inputs, so that moments contain weighted values.
        """
        x_TD = x_BTD.flatten(0, -2)
        return self.with_shared(x_TD, self.with_experts(x_TD, self._routed(x_TD), None)).view_as(x_BTD)

    def _routed(self, x_TD: Tensor) -> Routing:
        routing: Routing = self.role(ROUTER)(x_TD, self._router_bias())
        return routing

    def attended(self, hidden_states: Tensor, position_embeddings: Any) -> Tensor:
        """Return the residual stream (B, T, D) that a mixture reads, for whole sequences."""
        assert not self.parallel, "no family has a mixture beside its attention"
        if not self.attends:
            return hidden_states
        rest = dict.fromkeys(("attention_mask", "position_ids", "past_key_values"))
        attention, _ = self._attended(hidden_states, position_embeddings=position_embeddings, use_cache=False, **rest)
        return hidden_states + attention

    def routed(self, stream: Tensor) -> tuple[Tensor, Routing]:
        """Return the inputs (T, D) of the mixture, and their routing."""
        x_TD = self._normed("mlp_norm", stream).flatten(0, -2)
        return x_TD, self._routed(x_TD)

    def with_experts(
        self, x_TD: Tensor, routing: Routing, out_TD: Tensor | None, experts: range | None = None
    ) -> Tensor:
        """Add the outputs of some experts, or all, to the sum (T, D) of those before them, in float32 or better."""
        weight_Tk, chosen_Tk = routing
        if out_TD is None:
            out_TD = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, torch.float32))
        if self.every_expert:
            apart_TD = x_TD.detach().requires_grad_(torch.is_grad_enabled())  # stops gradients
            weight_T1 = weight_Tk.detach().mean(dim=-1, keepdim=True)
            router = self.role(ROUTER)
            assert isinstance(router.weight, Tensor)
            for expert in experts or range(len(router.weight)):
                expert_TD = self.expert(expert, apart_TD, weight_T1)
                out_TD = out_TD + (expert_TD - expert_TD.detach())
        for expert, token_t, place_t in passing(chosen_Tk):
            if experts is None or expert in experts:
                expert_tD = self.expert(expert, x_TD[token_t], weight_Tk[token_t, place_t, None])
                out_TD = out_TD.index_add(0, token_t, expert_tD.to(out_TD.dtype))
        return out_TD

    def expert(self, expert: int, x_tD: Tensor, weight_t1: Tensor) -> Tensor:
        """Return the weighted outputs (t, D) of an expert for its tokens."""
        name = f"experts.{expert}"
        if self.weighs_inputs:
            return self._mlp(x_tD * weight_t1.to(x_tD.dtype), name, None)
        return self._mlp(x_tD, name, weight_t1)

    def shared(self, x_TD: Tensor) -> Tensor:
        """Return the output (T, D) of the shared expert."""
        gate = self.role(SHARED_GATE)(x_TD).sigmoid() if self.has_role(SHARED_GATE) else None
        return self._mlp(x_TD, SHARED, gate)

    def with_shared(self, x_TD: Tensor, out_TD: Tensor) -> Tensor:
        """Return the output (T, D) of the mixture from the sum of its experts' outputs."""
        out_TD = out_TD.to(x_TD.dtype)
        return out_TD + self.shared(x_TD) if self.has_role(f"{SHARED}.down") else out_TD

    def finished(self, stream: Tensor, x_TD: Tensor, out_TD: Tensor) -> Tensor:
        """Return the layer's output from the residual stream and the sum of all experts' outputs."""
        return stream + self.written("mlp_out_norm", self.with_shared(x_TD, out_TD).view_as(stream))
