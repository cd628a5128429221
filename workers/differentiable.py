"""Runs one decoder layer forwards and differentiates it backwards, with the residual stream in float32.

Samples run one at a time, so that results do not depend on the micro-batch.

Legend: S sequence, D hidden, F features at a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.block_lamina import INPUT_NORM_ROLES, OUTPUT_NORM_ROLES
from manifests.errors import NumericsError
from pipeline.kernels.checks import all_finite
from workers.tapped_layer import TappedLayer, overflow_advice
from workers.wide_linear import widen_linears_

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
        with sdpa_kernel(SDPBackend.MATH):  # its backward pass is deterministic on every device
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


def _pulled(point: str) -> list[str]:
    return point.removeprefix("pull:").split("+")
