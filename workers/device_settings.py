"""How a worker's process computes on its GPU: settings that decide bytes, and the share of memory that is its own."""

from __future__ import annotations

import os

import torch

WORKSPACE = ":4096:8"  # a cuBLAS workspace with which products are deterministic


def settle_device(gpu_share: float) -> None:
    """For this process, once, before its first CUDA call; `gpu_share`: `workers.gpus`, 0 on a CPU.

    Deterministic algorithms (an operation that has none warns), float32 products in float32 (no TF32), sums of half
    precision products in float32. A share below 1 caps what the allocator takes of the GPU's memory.
    """
    if gpu_share == 0:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    torch.use_deterministic_algorithms(True, warn_only=True)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share)


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
