"""One layer of a large model on a device: seconds and memory by phase, beside what `plan` says at the device's rates.

    python -m tools.benchmarks.device_layer [--model 70B] [--device cuda] [--tokens 8192] [--narrower 1] [--gpu H200]

Weights are random, tokens are few: the seconds of forward pass and moments are scaled to 256 × 4096 tokens. On a CPU,
`--narrower 32` tries the tool.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.kernels.elimination import prune
from pipeline.kernels.exact_sums import MomentSum, choose_grid, sample_squares, whole_moment
from pipeline.plan.phases import solve_seconds
from pipeline.plan.probe import LayerShape, measured_rates
from pipeline.plan.rates import rates_of
from pipeline.plan.solve_work import SolveWork
from tools.benchmarks.jobs import print_table
from tools.simulate import geometry, work_of
from workers.device_settings import settle_device

WHOLE_TOKENS = 256 * 4096
KEPT = 0.75


def timed(call: Callable[[], Tensor], device: torch.device, times: int = 2) -> tuple[Tensor, float]:
    """What `call` gives, and the seconds of the last of some times: at the first, kernels are loaded and memory is
    asked for. The device is waited for."""
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        found = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return found, seconds


@torch.inference_mode()
def measure(hidden: int, width: int, tokens: int, device: torch.device) -> dict[str, float]:
    """Seconds: the products of an MLP, the moment of its channels, their elimination with the refit."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16) / columns**0.5

    up_ND, down_DN, inputs_TD = draw(width, hidden), draw(hidden, width), draw(tokens, hidden)
    channels_TN, forward = timed(lambda: torch.nn.functional.linear(inputs_TD, up_ND), device)
    moment_NN, moments = _moment(channels_TN, device)
    # Fewer tokens than channels leave a singular moment, which is solved otherwise than that of a whole job.
    moment_NN.diagonal().add_(moment_NN.diagonal().mean())
    _, solve = timed(lambda: prune(moment_NN, down_DN, int(KEPT * width)).weight, device, times=1)
    return {"one product of the MLP": forward, "moment": moments, "elimination": solve}


def _moment(channels_TN: Tensor, device: torch.device) -> tuple[Tensor, float]:
    """Σ h hᵀ, and the seconds of its products and additions."""
    sample_TN = channels_TN[:1024]
    grid = choose_grid(sample_squares(sample_TN), len(sample_TN), WHOLE_TOKENS, torch.bfloat16)
    total = MomentSum(grid, 1, device)

    def add() -> Tensor:
        total.add_(channels_TN)
        return total.bands()[0]

    _, seconds = timed(add, device)
    return whole_moment(total.bands(), grid)[0], seconds


def _narrowed(solve: SolveWork, narrower: int) -> SolveWork:
    cube = narrower**3
    return replace(
        solve,
        flops=solve.flops / cube,
        factor_flops=solve.factor_flops / cube,
        eigen_flops=solve.eigen_flops / cube,
        moved_bytes=solve.moved_bytes / narrower**2,
        steps=solve.steps // narrower,
    )


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--model", choices=("70B", "405B"), default="70B")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--narrower", type=int, default=1, help="divides both widths")
    options.add_argument("--gpu", help="whose rates the plan takes; default: measured")
    arguments = options.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("this machine has no CUDA device; --device cpu --narrower 32 tries the tool")
    device, shape = torch.device(arguments.device), geometry(arguments.model).layers[0]
    settle_device(1.0 if device.type == "cuda" else 0.0)
    hidden, width = shape.hidden // arguments.narrower, shape.intermediate // arguments.narrower
    probed = LayerShape(hidden, width, 4096)
    rates = (
        rates_of(arguments.gpu)
        if arguments.gpu
        else measured_rates(device, torch.bfloat16, torch.get_num_threads(), shape=probed)
    )
    found = measure(hidden, width, arguments.tokens, device)
    scale = WHOLE_TOKENS / arguments.tokens
    solve = next(solve for solve in work_of(arguments.model, "dense").solves if solve.name == "mlp")
    solve = _narrowed(solve, arguments.narrower)
    planned = {
        "one product of the MLP": 2.0 * WHOLE_TOKENS * hidden * width / rates.products,
        "moment": WHOLE_TOKENS * width**2 * (1 / rates.products + 20 / 4096 / rates.memory),
        "elimination": solve_seconds(solve, rates),
    }
    scaled = {name: seconds * (1.0 if name == "elimination" else scale) for name, seconds in found.items()}
    print_table(
        ["phase of a layer", "seconds", "by the plan"],
        [[name, f"{seconds:.2f}", f"{planned[name]:.2f}"] for name, seconds in scaled.items()],
    )
    if device.type == "cuda":
        print(
            f"\npeak: {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of {torch.cuda.get_device_name(device)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
