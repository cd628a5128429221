"""Half precision multiplied in float32 is as exact as in its own: every family, several forms, forwards, backwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lamina import processor_lamina
from lamina.processor_lamina import product_dtype
from pipeline.kernels.half_precision import linear
from tests.tensors import random
from tests.workers.bench import (
    EVERYTHING,
    FAMILIES,
    LOW,
    SAMPLES,
    SEQUENCE,
    make_setup,
    make_worker,
    save_source,
    solve_layer,
)
from workers.config import WorkerConfig
from workers.differentiable import DifferentiableLayer
from workers.embedding_and_head import head
from workers.layers import LayerReader
from workers.wide_linear import WideLinear, widen_linears_

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]


def slow(monkeypatch: pytest.MonkeyPatch, is_slow: bool = True) -> None:
    """The processor's half precision."""
    monkeypatch.setattr(processor_lamina, "multiplies_fast", lambda dtype: not is_slow)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", HALF)
def test_only_a_slow_cpu_multiplies_half_precision_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_slow, device, expected in [(True, "cpu", torch.float32), (False, "cpu", dtype), (True, "cuda", dtype)]:
        slow(monkeypatch, is_slow)
        assert product_dtype(dtype, torch.device(device)) == expected
        for other in (torch.float32, torch.float64):
            assert product_dtype(other, torch.device(device)) == other


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (3, 7, 5), (64, 300, 129), (257, 64, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_a_product_is_off_by_one_rounding(
    dtype: torch.dtype, tokens: int, inputs: int, outputs: int, scale: float
) -> None:
    values, weight, bias = (
        random(*sizes, seed=seed).mul(scale).to(dtype)
        for seed, sizes in enumerate([(2, tokens, inputs), (outputs, inputs), (outputs,)])
    )
    exact = functional.linear(values.double(), weight.double(), bias.double())
    sums = functional.linear(values.double().abs(), weight.double().abs(), bias.double().abs())  # what float32 adds up
    found = linear(values, weight.float(), bias.float())
    assert found.dtype == dtype
    info = torch.finfo(dtype)
    allowed = exact.abs() * info.eps / 2 + sums * 1e-6 + info.smallest_normal * info.eps
    assert bool(((found.double() - exact).abs() <= allowed).all())


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.eye(2)
    found = linear(torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]], dtype=torch.bfloat16), weight)
    assert found[0, 0].isnan()
    assert not found[1].isfinite().all()


def test_widening_again_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    narrow = nn.Sequential(nn.Linear(5, 4), nn.ModuleList([nn.Linear(4, 3, bias=False)])).bfloat16()
    names, weight = [*narrow.state_dict()], narrow[0].weight.detach().clone()
    wide = widen_linears_(narrow, torch.bfloat16, CPU)
    assert [*wide.state_dict()] == names
    assert wide[0].weight.dtype == torch.float32
    assert torch.equal(wide[0].weight, weight.float())
    assert type(wide[1][0]) is WideLinear
    assert wide[1][0].bias is None
    again = widen_linears_(wide.bfloat16(), torch.bfloat16, CPU)
    assert torch.equal(again[0].weight, weight.float())


def block_outputs(
    setup: WorkerConfig, staged: Any, dtype: torch.dtype, layer: int = 1
) -> tuple[Tensor, list[torch.dtype], list[nn.Linear]]:
    """The output, dtypes that the taps see, the linears."""
    seen: list[torch.dtype] = []
    block = LayerReader(replace(setup, dtype=dtype), CPU).block(layer, staged)
    points = [f"{role}.{side}" for role in ("v", "o", "down") for side in ("in", "out")]
    values = random(SAMPLES, SEQUENCE, setup.geometry.hidden, seed=1).to(torch.bfloat16).to(dtype)
    output = block.run(values, [(point, lambda tapped: seen.append(tapped.dtype)) for point in points])
    assert output is not None
    assert output.dtype == dtype
    return output, seen, [module for module in block.module.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(save_source(tmp_path / "model", family, torch.bfloat16), tmp_path / "run")
    exact, *_ = block_outputs(setup, None, torch.float32)
    slow(monkeypatch, False)
    narrow, _, linears = block_outputs(setup, None, torch.bfloat16)
    assert not any(isinstance(module, WideLinear) for module in linears)
    slow(monkeypatch)
    wide, seen, linears = block_outputs(setup, None, torch.bfloat16)
    assert linears
    assert all(isinstance(module, WideLinear) for module in linears)
    assert {*seen} == {torch.bfloat16}
    assert 0.0 < distance(wide, exact) < 1.2 * distance(narrow, exact) < 0.02


@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        ({"method": "flat_llm", **EVERYTHING}, LOW),
        ({"method": "lorc", "cache_keep": 0.6}, {"key": 9, "value": 11}),
        ({"method": "joint_rank_k"}, {"query_key": 20, "mlp": 25}),
        ({"method": "lestd"}, {"size": 6000}),
    ],
    ids=lambda value: value.get("method") if isinstance(value, dict) else None,
)
def test_a_compressed_layer(
    method: dict[str, Any], ranks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup(save_source(tmp_path / "model"), tmp_path / "run", method)
    staged, _ = solve_layer(make_worker(setup), 1, ranks)
    exact, *_ = block_outputs(setup, staged, torch.float32)
    slow(monkeypatch, False)
    narrow, *_ = block_outputs(setup, staged, torch.bfloat16)
    slow(monkeypatch)
    wide, _, linears = block_outputs(setup, staged, torch.bfloat16)
    assert linears
    assert all(isinstance(module, WideLinear) for module in linears)
    assert 0.0 < distance(wide, exact) < 1.2 * distance(narrow, exact) < 0.05


@pytest.mark.parametrize("dtype", HALF)
def test_gradients(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(save_source(tmp_path / "model"), tmp_path / "run")
    values_SD, gradient_SD = (random(SEQUENCE, setup.geometry.hidden, seed=seed).to(dtype).float() for seed in (1, 2))

    def gradients(of: torch.dtype) -> dict[str, Tensor]:
        block = DifferentiableLayer(LayerReader(replace(setup, dtype=of), CPU).block(1, None))
        points = ("q.out", "down.out", "pull:q+k", "mid")
        found_SD, found = block.pull_back(values_SD, lambda _: gradient_SD, points)
        return {"in": found_SD, **found}

    exact = gradients(torch.float64)
    slow(monkeypatch, False)
    narrow = gradients(dtype)
    slow(monkeypatch)
    wide = gradients(dtype)
    for point, expected in exact.items():
        assert wide[point].dtype == narrow[point].dtype, point
        assert distance(wide[point], expected) <= 1.2 * distance(narrow[point], expected) < 0.05, point
    assert distance(wide["in"], exact["in"]) > 0.0


def test_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(save_source(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "run", dtype=torch.bfloat16)
    hidden_TD = random(7, setup.geometry.hidden, seed=1)
    exact = head(LayerReader(replace(setup, dtype=torch.float32), CPU))(hidden_TD.bfloat16().float())
    slow(monkeypatch)
    found = head(LayerReader(setup, CPU))(hidden_TD.bfloat16())
    assert found.dtype == torch.float32
    assert 0.0 < distance(found, exact) < 0.01
