"""Differentiates a layer over one sample: as a whole, or in the steps through slices of its experts and around them.

In steps, the gradient of a sample goes back through the shared expert, then through the experts in descending order,
then through the router and the attention. This is the order in which autograd adds up a whole layer's gradients, so
that the size of a slice changes no bit.

Legend: S sequence, D hidden, k experts of a token, t tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.mixture_lamina import SHARED, passing
from workers.differentiable import DifferentiableLayer, residual_dtype

EXPERT = "experts"
Take = Callable[[Mapping[str, Tensor]], None]  # receives the gradients (S, F) of a sample at some points


@dataclass
class Sample:
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
        with sdpa_kernel(SDPBackend.MATH):  # its backward pass is deterministic on every device
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

    def enter(self, sample: Sample, mixed_SD: Tensor | None, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Go back from the layer's output to the mixture's. `gradient_of`: as in `DifferentiableLayer.pull_back`."""
        mixed_SD = torch.zeros_like(sample.stream) if mixed_SD is None else mixed_SD
        mixed_SD = mixed_SD.detach().requires_grad_()
        with torch.enable_grad():
            output_SD = sample.stream + self.module.written("mlp_out_norm", mixed_SD)
        sample.outgoing = gradient_of(output_SD.detach())
        (sample.mixed,) = torch.autograd.grad(output_SD, [mixed_SD], sample.outgoing)

    def share(self, sample: Sample, take: Take) -> None:
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

    def through(self, sample: Sample, experts: range, take: Take) -> None:
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

    def leave(self, sample: Sample, hidden_SD: Tensor, take: Take) -> Tensor:
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


def _points_of(points: Iterable[str], block: str) -> list[str]:
    """Return the points of an expert."""
    return [point for point in points if point.removeprefix("pull:").startswith(f"{block}.")]
