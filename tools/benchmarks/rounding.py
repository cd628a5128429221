"""Rounding beside the solve that it follows, on a narrower layer of a large model's shape, and at full width.

    python -m tools.benchmarks.rounding [--model 70B] [--narrower 8] [--bits 4] [--device cpu]

Weights and moments are random. Each part is solved by `loss_aware` at about 0.8 of its numbers, without a sample, and
rounded in groups of 32. To full width the solve's seconds grow as n³, its operations; the rounding's as what `plan`
says of it at the device's measured rates.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from manifests.loading import parse_manifest
from manifests.methods import LossAware
from manifests.quantize import Quantize
from pipeline.cost_model.probe import measured_rates
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.rounding_work import round_seconds, rounding_work
from pipeline.cost_model.solve_work import moment_width
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.method import Group, Solution, Statistics, Task
from pipeline.rounding.solutions import input_moments, round_solution
from tools.benchmarks.jobs import print_table
from tools.simulate import geometry

GROUP, KEPT = 32, 0.75
SHARES = {"query_key": 0.5, "value": 1.0, "output": 0.75, "width": KEPT, "gate_up": 0.75, "down": 0.75}


def layer_of(shape: LayerGeometry, narrower: int) -> LayerGeometry:
    """With as many times fewer heads and channels, and as much narrower."""
    return replace(
        shape,
        hidden=shape.hidden // narrower,
        intermediate=shape.intermediate // narrower,
        heads=shape.heads // narrower,
        kv_heads=max(1, shape.kv_heads // narrower),
    )


def random_statistics(group: Group, layer: LayerGeometry, device: torch.device) -> Statistics:
    """Moments of a falling spectrum; of a sample, one token."""
    source, moments = torch.Generator(device).manual_seed(0), {}
    for moment in dict.fromkeys((*group.moments, *input_moments(group.roles))):
        width = moment_width(moment, layer)
        if moment.kind == "sample":
            moments[moment] = torch.randn(1, 1, width, generator=source, device=device)
        elif moment.diagonal:
            moments[moment] = torch.rand(moment.groups, width, generator=source, device=device).double()
        else:
            values_TF = torch.randn(2 * width, width, generator=source, device=device)
            values_TF *= torch.logspace(0, -1, width, device=device)
            moments[moment] = (values_TF.T @ values_TF).double().expand(moment.groups, -1, -1)
    return Statistics(moments, 2 * layer.hidden)


def ranks_of(layer: LayerGeometry) -> dict[str, int]:
    """Of all parts, in whole groups."""
    full = {"value": layer.head_dim, "width": layer.intermediate}
    return {
        name: max(GROUP, int(share * full.get(name, layer.hidden)) // GROUP * GROUP) for name, share in SHARES.items()
    }


def seconds_of(method: LossAwareMethod, group: Group, layer: LayerGeometry, bits: int, device: torch.device) -> Tensor:
    """(2,): of the solve, and of rounding."""
    source = torch.Generator(device).manual_seed(1)
    shapes = {key: shape for key, (_, shape) in layer.tensors(group.roles).items()}
    weights = {
        key: (torch.randn(shape, generator=source, device=device) / shape[-1] ** 0.5).bfloat16()
        for key, shape in shapes.items()
    }
    found = random_statistics(group, layer, device)
    solution, solving = _timed(lambda: method.compress(group, layer, weights, found, ranks_of(layer)), device)
    quantize = Quantize(bits=4, group=32)
    _, rounding = _timed(lambda: round_solution(solution, quantize, bits, found.moments, weights), device)
    return torch.tensor([solving, rounding], dtype=torch.float64)


def _timed(call: object, device: torch.device) -> tuple[Solution, float]:
    assert callable(call)
    started = time.perf_counter()
    found = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - started


def planned(groups: tuple[Group, ...], layer: LayerGeometry, rates: Rates) -> list[float]:
    """What the plan says of rounding, by group."""
    manifest = parse_manifest({
        "version": 1, "model": {"source": "model"}, "output": "output", "run_dir": "run", "budget": {"keep": 0.8},
        "calibration": {"text": {"files": ["text.txt"]}}, "methods": [{"method": "loss_aware"}],
        "quantize": {"bits": 4, "group": GROUP},
    })  # fmt: skip
    tasks = [Task.of(0, replace(group, moments=(*group.moments, *input_moments(group.roles)))) for group in groups]
    return [round_seconds(work, rates) for work in rounding_work(tasks, manifest, [layer], KEPT)]


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--model", choices=("70B", "405B"), default="70B")
    options.add_argument("--narrower", type=int, default=8)
    options.add_argument("--bits", type=int, choices=(8, 4, 3), default=4)
    options.add_argument("--device", default="cpu")
    arguments = options.parse_args(argv)
    device, whole = torch.device(arguments.device), geometry(arguments.model).layers[0]
    layer = layer_of(whole, arguments.narrower)
    method = LossAwareMethod(LossAware(method="loss_aware"))
    model = Geometry("llama", layer.hidden, 32000, False, "model.layers", (layer,), ())
    groups = method.claims(model)
    found = [seconds_of(method, group, layer, arguments.bits, device) for group in groups]
    rates = measured_rates(device, torch.float32, torch.get_num_threads())
    grown = [
        large / small for large, small in zip(planned(groups, whole, rates), planned(groups, layer, rates), strict=True)
    ]
    rows = []
    for group, seconds, growth in zip(groups, found, grown, strict=True):
        solving, rounding = seconds.tolist()
        rows.append([group.name, solving, rounding, solving * arguments.narrower**3, rounding * growth])
    rows.append(["all", *(sum(float(row[column]) for row in rows) for column in range(1, 5))])
    titles = ["part", "solve", "round", f"{arguments.model}: solve", "round"]
    print_table(titles, [[row[0], *(f"{seconds:.2f}" for seconds in row[1:])] for row in rows])
    _, solving, rounding, whole_solving, whole_rounding = rows[-1]
    print(f"\nrounding / solve: {rounding / solving:.2f}; at full width {whole_rounding / whole_solving:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
