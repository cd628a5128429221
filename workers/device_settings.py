"""Settings of a worker's process for its GPU: deterministic kernels, precision, and the share of its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

USABLE_SHARE = 0.85  # usable share of a GPU's memory; CUDA and fragmentation take the rest
WORKSPACE = ":4096:8"  # a cuBLAS workspace that makes products deterministic


def configure_device(gpu_share: float) -> None:
    """Configure torch for this process, before its first CUDA call. `gpu_share`: `workers.gpus`.

    Algorithms are deterministic; an operation without a deterministic one warns. Products of float32 use TF32 only
    inside `tensor_cores`. Products of half precision are summed in float32. A share below 1 limits the allocator to
    that share of the GPU's memory.
    """
    if gpu_share == 0:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would fill pinned memory, too
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share)


def device_room(device: torch.device, gpu_share: float, needed_bytes: int) -> int:
    """Return the bytes of the GPU's memory beyond `needed_bytes` and a reserve for the allocator.

    Return 0 on a CPU, or if the need is unknown (0).
    """
    if device.type != "cuda" or not needed_bytes:
        return 0
    _, total = torch.cuda.mem_get_info(device)
    return max(0, int(USABLE_SHARE * min(1.0, gpu_share) * total) - needed_bytes)


@contextmanager
def tensor_cores(stored: torch.dtype) -> Iterator[None]:
    """Allow TF32 in float32 products on a GPU, for a model stored in half precision.

    TF32 rounds factors to 10 bits and sums in float32. Weights stored in half precision, and values that its forward
    pass computes, are exact in 10 bits. Other values have a relative error of 2⁻¹¹, an eighth of the forward pass's. A
    model stored in float32 is multiplied in float32.
    """
    matmul, exact = torch.backends.cuda.matmul, torch.finfo(stored).bits == 16
    before, matmul.allow_tf32 = matmul.allow_tf32, exact or matmul.allow_tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def device_settings() -> dict[str, str]:
    """Return the current settings, for the record of the hardware."""
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
        "tf32": str(matmul.allow_tf32),
        "reduced_precision": f"bfloat16 {matmul.allow_bf16_reduced_precision_reduction}, "
        f"float16 {matmul.allow_fp16_reduced_precision_reduction}",
    }
