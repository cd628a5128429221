"""Differentiates one decoder layer backwards, with the residual stream in float32.

Samples run one at a time, so that results do not depend on the micro-batch. A sample goes back through the whole layer,
or in steps: through the shared expert, then through slices of experts in descending order, then through the router and
the attention. This is the order in which autograd adds up a whole layer's gradients, so that the size of a slice
changes no bit.

Legend: S sequence, D hidden, F features at a point, k experts of a token, t tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lamina.block_lamina import INPUT_NORM_ROLES, OUTPUT_NORM_ROLES
from lamina.mixture_lamina import SHARED, passing
from manifests.errors import NumericsError
from pipeline.kernels.attention import deterministic_attention
from pipeline.kernels.checks import all_finite
from workers.tapped_layer import TappedLayer, overflow_advice
from workers.wide_linear import widen_linears_

EXPERT = "experts"
Take = Callable[[Mapping[str, Tensor]], None]  # receives the gradients (S, F) of a sample at some points
RESIDUAL_NORMS = (*INPUT_NORM_ROLES, *OUTPUT_NORM_ROLES)


def backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products: the checkpoint's, or bfloat16 for float16, whose range is too small."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream and its gradients: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


class DifferentiableLayer:
    """Computes vector-Jacobian products of a layer. It changes the block, which must not be used elsewhere."""

    def __init__(self, block: TappedLayer) -> None:
        self.block = block
        self.dtype = backward_dtype(block.dtype)
        if self.dtype != block.dtype:
            widen_linears_(block.module.to(self.dtype), self.dtype, block.device)
            block.dtype = self.dtype  # for experts that it will load
        roles = block.geometry.roles
        for role in RESIDUAL_NORMS:
            if role in roles:
                block.module.role(role).to(residual_dtype(self.dtype))
        reading = (each.role for each in block.geometry.copied if each.reads)
        for role in (*block.geometry.matrices, *reading):
            block.module.role(role).register_forward_pre_hook(self._cast)

    def run(self, hidden_SD: Tensor) -> Tensor:
        """Return the layer's output (S, D), in the residual's dtype."""
        with torch.no_grad():
            return self._forward(hidden_SD.to(residual_dtype(self.dtype)))

    def pull_back(
        self, hidden_SD: Tensor, gradient_of: Callable[[Tensor], Tensor], points: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients at the layer's input (S, D) and at each point (S, F). docs/methods.md#gradient-moments.

        Args:
            gradient_of: output (S, D) -> gradient at the output (S, D).
            points: `ROLE.out`, `mid`, `out` and `pull:ROLE+ROLE`, see `methods.method.Moment`. For an expert, the rows
                are its tokens, of which there may be none.

        Raises:
            NumericsError: a gradient is not finite, naming layer and point.
        """
        hidden_SD = hidden_SD.detach().to(residual_dtype(self.dtype)).requires_grad_()
        with torch.enable_grad(), self.captured(points) as captured:
            output_SD = self._forward(hidden_SD)
        outgoing_SD = gradient_of(output_SD.detach())
        input_SD, *others = torch.autograd.grad(output_SD, [hidden_SD, *captured.values()], outgoing_SD)
        self.require_finite("in", input_SD)
        return input_SD, self.at(points, captured, others, outgoing_SD)

    def at(
        self,
        points: Iterable[str],
        captured: Iterable[str],
        others: Iterable[Tensor],
        outgoing_SD: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the gradients (S, F) at some points from those of the `captured` tensors.

        `outgoing_SD`: the gradient at the layer's output. Raises NumericsError as `pull_back`.
        """
        gradients = {name: gradient.flatten(0, -2) for name, gradient in zip(captured, others, strict=True)}
        if outgoing_SD is not None:
            gradients["out"] = outgoing_SD
            if self.block.config.block["parallel"]:
                gradients["mid"] = outgoing_SD
        wanted = {point: self._at(point, gradients) for point in points}
        for name, gradient in wanted.items():
            self.require_finite(name, gradient)
        return wanted

    def _forward(self, hidden_SD: Tensor) -> Tensor:
        angles = self.block.angles(hidden_SD.detach()[None].to(self.dtype))
        with deterministic_attention(self.block.device):
            output_1SD: Tensor = self.block.module(hidden_SD[None], position_embeddings=angles)
        return output_1SD[0]

    def _cast(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0].to(self.dtype), *arguments[1:])

    @contextmanager
    def captured(self, points: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Collect the tensors of the forward pass whose gradients are needed."""
        captured: dict[str, Tensor] = {}
        roles = {point.removesuffix(".out") for point in points if point.endswith(".out")}
        roles |= {role for point in points if point.startswith("pull:") for role in _pulled(point)}

        def keep(name: str) -> Callable[..., None]:
            return lambda _, __, result: captured.update({name: result})

        with ExitStack() as hooks:
            for role in sorted(roles):
                hook = self.block.module.role(role).register_forward_hook(keep(f"{role}.out"))
                hooks.callback(hook.remove)
            if "mid" in points and not self.block.config.block["parallel"]:
                geometry = self.block.geometry
                reader = "mlp_norm" if "mlp_norm" in geometry.roles else geometry.mlps[0].readers[0].role
                hook = self.block.module.role(reader).register_forward_pre_hook(
                    lambda _, arguments: captured.update({"mid": arguments[0]}), prepend=True
                )
                hooks.callback(hook.remove)
            yield captured

    def _at(self, point: str, gradients: dict[str, Tensor]) -> Tensor:
        if not point.startswith("pull:"):
            return gradients[point] if point in gradients else self._nothing(point)
        pulled: Tensor | int = 0
        for role in _pulled(point):  # W_roleᵀ g_role, row by row
            weight_OD = self.block.module.role(role).weight
            assert isinstance(weight_OD, Tensor)
            gradient = self._at(f"{role}.out", gradients).to(weight_OD.dtype)
            pulled = pulled + (gradient @ weight_OD).to(residual_dtype(self.dtype))
        assert isinstance(pulled, Tensor)
        return pulled

    def _nothing(self, point: str) -> Tensor:
        """Return no rows (0, F), for an expert without tokens of the sample."""
        return torch.zeros(0, self.block.geometry.features(point), device=self.block.device)

    def require_finite(self, point: str, gradient: Tensor) -> None:
        """Raise NumericsError, naming layer and point, unless a gradient is finite."""
        if not all_finite(gradient):
            raise NumericsError(
                f"layer {self.block.index}: the gradient at {point} holds NaN or infinity ({self.dtype}); "
                f"{overflow_advice(self.dtype)}"
            )


@dataclass
class ReturningSample:
    """A sample on its way back.

    Attributes:
        stream: (S, D), the residual stream that the mixture reads.
        outgoing: (S, D), the gradient at the layer's output; `mixed`: at the mixture's.
        inputs, weights: the gradients so far, (S, D) at the mixture's inputs and (S, k) at the weights of the experts.
    """

    stream: Tensor
    outgoing: Tensor
    mixed: Tensor
    inputs: Tensor
    weights: Tensor

    @classmethod
    def of(cls, stream: Tensor) -> Self:
        """Return a sample before `LayerGradients.enter`."""
        nothing = torch.zeros(0)
        return cls(stream, nothing, nothing, nothing, nothing)


class LayerGradients:
    """Vector-Jacobian products of a layer, and the gradients at some points in it.

    `every_expert`: to choose grids, an expert without tokens of a sample is differentiated at all of its tokens.
    """

    def __init__(self, layer: DifferentiableLayer, points: Sequence[str], every_expert: bool = False) -> None:
        self.layer = layer
        self.block, self.module = layer.block, layer.block.module
        self.points = points
        self.every_expert = every_expert

    def whole(self, hidden_SD: Tensor, gradient_of: Callable[[Tensor], Tensor], take: Take) -> Tensor:
        """Go back through the whole layer. Arguments and result as in `DifferentiableLayer.pull_back`."""
        with self.block.every_expert() if self.every_expert else nullcontext():
            gradient_SD, gradients = self.layer.pull_back(hidden_SD, gradient_of, self.points)
        take(gradients)
        return gradient_SD

    @property
    def reads_output(self) -> bool:
        """True if the way back from the layer's output needs the values of the mixture's output."""
        return self.module.has_role("mlp_out_norm")

    def attended(self, hidden_SD: Tensor) -> Tensor:
        """Return the residual stream (S, D) that the mixture reads."""
        return self._attended(self._residual(hidden_SD))

    def _residual(self, hidden_SD: Tensor) -> Tensor:
        return hidden_SD.detach().to(residual_dtype(self.layer.dtype))

    def _attended(self, hidden_SD: Tensor) -> Tensor:
        with deterministic_attention(self.block.device):
            angles = self.block.angles(hidden_SD.detach()[None].to(self.layer.dtype))
            stream_1SD: Tensor = self.module.attended(hidden_SD[None], angles)
        return stream_1SD[0]

    def added(self, stream_SD: Tensor, sum_SD: Tensor | None, experts: range) -> Tensor:
        """Return the sum (S, D) over experts with the outputs of these added."""
        x_SD, routing = self.module.routed(stream_SD)
        added_SD: Tensor = self.module.with_experts(x_SD, routing, sum_SD, experts)
        return added_SD

    def mixed(self, stream_SD: Tensor, sum_SD: Tensor) -> Tensor:
        """Return the mixture's output (S, D) from the sum over all experts."""
        mixed_SD: Tensor = self.module.with_shared(self.module.routed(stream_SD)[0], sum_SD)
        return mixed_SD

    def enter(self, sample: ReturningSample, mixed_SD: Tensor | None, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Go back from the layer's output to the mixture's. `gradient_of`: as in `DifferentiableLayer.pull_back`."""
        mixed_SD = torch.zeros_like(sample.stream) if mixed_SD is None else mixed_SD
        mixed_SD = mixed_SD.detach().requires_grad_()
        with torch.enable_grad():
            output_SD = sample.stream + self.module.written("mlp_out_norm", mixed_SD)
        sample.outgoing = gradient_of(output_SD.detach())
        (sample.mixed,) = torch.autograd.grad(output_SD, [mixed_SD], sample.outgoing)

    def share(self, sample: ReturningSample, take: Take) -> None:
        """Go back from the mixture's output through the shared expert."""
        x_SD, (weights_Sk, _) = self.module.routed(sample.stream)
        sample.weights = torch.zeros_like(weights_Sk)
        sample.inputs = torch.zeros_like(x_SD)
        if any(block.name == SHARED for block in self.block.geometry.mlps):
            x_SD = x_SD.detach().requires_grad_()
            points = _points_of(self.points, SHARED)
            with torch.enable_grad(), self.layer.captured(points) as captured:
                shared_SD = self.module.shared(x_SD)
            gradients = torch.autograd.grad(shared_SD, [x_SD, *captured.values()], sample.mixed.to(shared_SD.dtype))
            sample.inputs = gradients[0]
            take(self.layer.at(points, captured, gradients[1:]))

    def through(self, sample: ReturningSample, experts: range, take: Take) -> None:
        """Go back through the experts of a slice."""
        x_SD, (weights_Sk, chosen_Sk) = self.module.routed(sample.stream)
        tokens = {expert: places for expert, *places in passing(chosen_Sk) if expert in experts}
        wanted: dict[str, Tensor] = {}
        for expert in reversed(experts):
            points = _points_of(self.points, f"{EXPERT}.{expert}")
            if expert in tokens:
                token_t, place_t = tokens[expert]
                scale_t1 = weights_Sk[token_t, place_t, None]
            elif self.every_expert:
                token_t, place_t = torch.arange(len(x_SD), device=x_SD.device), None
                scale_t1 = weights_Sk.mean(dim=-1, keepdim=True)
            else:
                wanted |= self.layer.at(points, {}, ())
                continue
            inputs = x_SD[token_t].requires_grad_(), scale_t1.requires_grad_()
            with torch.enable_grad(), self.layer.captured(points) as captured:
                expert_tD = self.module.expert(expert, *inputs)
            outgoing_tD = sample.mixed[token_t].to(expert_tD.dtype)
            input_tD, weight_t1, *others = torch.autograd.grad(expert_tD, [*inputs, *captured.values()], outgoing_tD)
            wanted |= self.layer.at(points, captured, others)
            if place_t is not None:
                sample.inputs.index_add_(0, token_t, input_tD)
                sample.weights[token_t, place_t] = weight_t1[:, 0]
        take(wanted)

    def leave(self, sample: ReturningSample, hidden_SD: Tensor, take: Take) -> Tensor:
        """Go back through the router and the attention. Return the gradient at the layer's inputs `hidden_SD`."""
        hidden_SD = self._residual(hidden_SD).requires_grad_()
        points = [point for point in self.points if not _points_of([point], EXPERT) and not _points_of([point], SHARED)]
        with torch.enable_grad(), self.layer.captured(points) as captured:
            stream_SD = self._attended(hidden_SD)
            x_SD, (weights_Sk, _) = self.module.routed(stream_SD)
        outgoing = [sample.outgoing, sample.inputs, sample.weights]
        input_SD, *others = torch.autograd.grad(
            [stream_SD, x_SD, weights_Sk], [hidden_SD, *captured.values()], outgoing
        )
        take(self.layer.at(points, captured, others, sample.outgoing))
        self.layer.require_finite("in", input_SD)
        return input_SD


def _pulled(point: str) -> list[str]:
    return point.removeprefix("pull:").split("+")


def _points_of(points: Iterable[str], block: str) -> list[str]:
    """Return the points of an expert."""
    return [point for point in points if point.removeprefix("pull:").startswith(f"{block}.")]
