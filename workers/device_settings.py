"""How a worker's process computes on its GPU: settings that decide bytes, and the share of memory that is its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

RESERVE = 0.85  # of a GPU's memory: the rest is CUDA's own, and what the allocator cannot give out in one piece
WORKSPACE = ":4096:8"  # a cuBLAS workspace with which products are deterministic


def settle_device(gpu_share: float) -> None:
    """For this process, once, before its first CUDA call; `gpu_share`: `workers.gpus`, 0 on a CPU.

    Deterministic algorithms (an operation that has none warns), float32 products in float32 (TF32 in `tensor_cores`
    alone), sums of half precision products in float32. A share below 1 caps what the allocator takes of the GPU's
    memory.
    """
    if gpu_share == 0:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # or pinned memory, too
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share)


def device_room(device: torch.device, gpu_share: float, needed_bytes: int) -> int:
    """Bytes of a GPU's memory that are left beside what a worker needs of it, and a reserve for its allocator; 0 on a
    CPU, or where that need is not known."""
    if device.type != "cuda" or not needed_bytes:
        return 0
    _, total = torch.cuda.mem_get_info(device)
    return max(0, int(RESERVE * min(1.0, gpu_share) * total) - needed_bytes)


@contextmanager
def tensor_cores(stored: torch.dtype) -> Iterator[None]:
    """Lets float32 products of a GPU round what they multiply to TF32's 10 bits, of a model stored in half precision.

    Its weights are exact in them, and so are values that its own forward pass has made; others lose 2⁻¹¹ of themselves,
    an eighth of what that pass loses. Sums stay float32. A model stored in float32 is multiplied in it.
    """
    matmul, exact = torch.backends.cuda.matmul, torch.finfo(stored).bits == 16
    before, matmul.allow_tf32 = matmul.allow_tf32, exact or matmul.allow_tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def device_settings() -> dict[str, str]:
    """The settings as they are, for the record of what a result was computed on."""
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
        "tf32": str(matmul.allow_tf32),
        "reduced_precision": f"bfloat16 {matmul.allow_bf16_reduced_precision_reduction}, "
        f"float16 {matmul.allow_fp16_reduced_precision_reduction}",
    }
