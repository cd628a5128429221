"""Pairs at the writers of routed experts: of which tokens they are, and that a fit to all of them lowers the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pipeline.families.fused import fused_tensors
from pipeline.kernels.refit import correction
from tests import factories
from tests.workers.bench import make_setup
from workers.layers import LayerReader
from workers.pairing import layer_pairs
from workers.tapped_layer import TappedLayer

LAYER = 1  # of the Qwen2-MoE model, whose first layer is dense
TOKENS = 2 * 60
SCALED = 0.6 * (1 + 1e-4)  # of Granite's outputs, and the ridge


class Both(NamedTuple):
    """A dense layer and another, each with the hidden states that it reads."""

    dense: TappedLayer
    packed: TappedLayer
    read: Tensor
    packed_read: Tensor

    def errors(self) -> Tensor:
        """What the layer's output lacks (T, D)."""
        dense_BSD, packed_BSD = self.dense.run(self.read), self.packed.run(self.packed_read)
        assert dense_BSD is not None
        assert packed_BSD is not None
        return (dense_BSD - packed_BSD).flatten(0, 1)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {point: (x, e) for point, x, e in layer_pairs(*self, self.packed.geometry.expert_points)}


def writer_weight(layer: TappedLayer, point: str) -> Tensor:
    weight = layer.module.role(point.removesuffix(".in")).weight
    assert isinstance(weight, Tensor)
    return weight


@pytest.fixture(params=["mixtral", "qwen2_moe", "deepseek_v3", "granitemoe"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    """A layer and one whose experts write something else, behind which hidden states are other ones, too."""
    setup = make_setup(factories.make_model(tmp_path / "model", request.param), tmp_path / "run", dtype=torch.float64)
    setup = replace(setup, source=setup.source.with_parts(fused_tensors(setup.geometry)))
    dense, packed = (LayerReader(setup, torch.device("cpu")).block(LAYER, None) for _ in range(2))
    draw = torch.Generator().manual_seed(2)
    for point in packed.geometry.expert_points:
        weight = writer_weight(packed, point)
        weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
    read = torch.randn(2, TOKENS // 2, packed.geometry.hidden, generator=draw, dtype=torch.float64)
    return Both(dense, packed, read, read + 0.3 * torch.randn(read.shape, generator=draw, dtype=torch.float64))


def test_an_expert_is_to_write_its_part_on_the_tokens_that_the_compressed_layer_sends_to_it(both: Both) -> None:
    points = both.packed.geometry.expert_points
    weights: dict[str, Tensor] = {}
    routing = [(point.replace(".down.in", ".routing"), point) for point in points]
    both.packed.run(
        both.packed_read, [(tap, lambda p, point=point: weights.update({point: p})) for tap, point in routing]
    )
    chosen_TE = torch.cat([weights[point] for point in points], dim=1) > 0
    (k,) = chosen_TE.sum(dim=1).unique().tolist()
    scale = SCALED if both.packed.module.residual_scale else 1.0
    pairs = both.pairs()
    assert sum(len(x) for x, _ in pairs.values()) == TOKENS * k
    for point, (x, e) in pairs.items():
        token_t = chosen_TE[:, points.index(point)].nonzero()[:, 0]
        assert len(x) == len(token_t)
        torch.testing.assert_close(e, both.errors()[token_t] / k / scale)


def test_where_every_expert_sees_all_tokens_x_and_e_are_of_all(both: Both) -> None:
    with both.packed.every_expert():
        pairs = both.pairs()
    assert pairs.keys() == {*both.packed.geometry.expert_points}
    assert {(len(x), len(e)) for x, e in pairs.values()} == {(TOKENS, TOKENS)}


def test_what_is_fitted_to_all_of_them_at_once_lowers_the_error(both: Both) -> None:
    """Σ‖e − Σ Δ x‖² <= k Σ Σ‖e/k − Δ x‖², which is as large before, and which the fit of each expert lowers."""
    before = float(both.errors().square().sum())
    for point, (x, e) in both.pairs().items():
        writer_weight(both.packed, point).add_(correction(e.T @ x / TOKENS, x.T @ x / TOKENS, 1e-4))
    assert float(both.errors().square().sum()) < 0.98 * before


def test_the_same_layer_lacks_nothing(both: Both) -> None:
    same = Both(both.dense, both.dense, both.read, both.read)
    assert all(not e.any() for _, e in same.pairs().values())


@pytest.mark.parametrize("both", ["qwen2_moe", "deepseek_v3"], indirect=True)
def test_a_shared_expert_sees_every_token_by_its_weight(both: Both) -> None:
    """The rows of a mixture have lost their samples."""
    seen: list[Tensor] = []
    both.packed.run(both.packed_read, [("shared.down.in", seen.append)])
    dense_BSD = both.dense.run(both.read)
    assert dense_BSD is not None
    weight_T1 = (dense_BSD.square().mean(dim=-1, keepdim=True) + 1e-6).flatten(0, 1) ** -0.5
    ((_, x_TF, e_TD),) = layer_pairs(*both, ["shared.down.in"])
    assert torch.allclose(x_TF, seen[0].flatten(0, -2) * weight_T1)
    assert torch.allclose(e_TD, both.errors() * weight_T1)
