"""loss_aware on the experts of a mixture: moments and samples weighted by the router."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manifests.methods import LossAware
from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods import moments as moments_module
from pipeline.methods.loss_aware import mlp
from pipeline.methods.loss_aware.mlp_sample import routing_sample, sample_of
from pipeline.methods.loss_aware.mlp_solver import Solver
from pipeline.methods.method import Moment, Statistics
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.ranks.curves import Point, from_columns

TOKENS, HIDDEN, WIDTH, EXPERTS = 600, 24, 32, 3


def make_block(expert: int, routed: bool = True) -> MLPBlock:
    name = f"experts.{expert}"
    readers = tuple(
        Matrix(f"{name}.{role}", WIDTH, HIDDEN, False, "mlp.in", f"{name}.down.in") for role in ("gate", "up")
    )
    writer = Matrix(f"{name}.down", HIDDEN, WIDTH, False, f"{name}.down.in", "out")
    return MLPBlock(name, readers, writer, WIDTH, "silu", f"{name}.weight" if routed else "")


def make_group(
    block: MLPBlock, weights: dict[str, Tensor] | None = None, statistics: Statistics | None = None
) -> mlp.MLP:
    layer = LayerGeometry("mixture", 0, "layers.0.", HIDDEN, (block,), (), (), 32)
    group = mlp.mlp_group(LossAware(method="loss_aware", widths=4, factors="plain"), layer, block, corrects=False)
    return group.with_data(weights or {}, statistics)


class Layer:
    """Experts that read the same tokens; each token has a weight at two of the three."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)  # noqa: E731  # short
        self.inputs_TD = draw(TOKENS, HIDDEN) * torch.logspace(0, -1.5, HIDDEN) @ draw(HIDDEN, HIDDEN) / 2
        self.routing_TE = draw(TOKENS, EXPERTS).softmax(dim=1)
        self.routing_TE.scatter_(1, self.routing_TE.argmin(dim=1, keepdim=True), 0.0)
        self.weights = [
            {m.weight_key: draw(*m.shape) / HIDDEN**0.5 for m in make_block(e).matrices} for e in range(EXPERTS)
        ]
        root_DD = draw(HIDDEN, HIDDEN)
        self.metric_DD = root_DD @ root_DD.T / HIDDEN
        self.squares = draw(HIDDEN, 2 * WIDTH).square().mean(dim=0).split(WIDTH)

    def hidden(self, weights: dict[str, Tensor], block: MLPBlock) -> Tensor:
        gate, up = (self.inputs_TD @ weights[reader.weight_key].T for reader in block.readers)
        return torch.nn.functional.silu(gate) * up

    def statistics(self, expert: int, factors: dict[Moment, tuple[Tensor, object]] | None = None) -> Statistics:
        block = make_block(expert)
        routing_T = self.routing_TE[:, expert]
        hidden_TN = self.hidden(self.weights[expert], block) * routing_T[:, None]
        values = {
            input_moment(block.readers[0]): self.input_total[None],
            input_moment(block.writer): (hidden_TN.T @ hidden_TN)[None],
            output_gradient(block.writer): self.metric_total[None],
            sample_of(block): self.inputs_TD[None],
            routing_sample(block): routing_T[None, :, None],
            **{output_gradient(reader): part[None] for reader, part in zip(block.readers, self.squares, strict=True)},
        }
        return Statistics(values, TOKENS, factors={} if factors is None else factors)  # type: ignore[arg-type]  # a memo

    @property
    def input_total(self) -> Tensor:
        if not hasattr(self, "_total"):
            self._total = self.inputs_TD.T @ self.inputs_TD
        return self._total

    @property
    def metric_total(self) -> Tensor:
        return self.metric_DD


def points_of(layer: Layer, expert: int, statistics: Statistics) -> list[Point]:
    return from_columns(make_group(make_block(expert), layer.weights[expert], statistics).curve())


def test_an_expert_of_all_tokens_is_an_mlp() -> None:
    layer = Layer()
    layer.routing_TE = torch.ones_like(layer.routing_TE)
    statistics, dense = layer.statistics(0), make_block(0, routed=False)
    assert routing_sample(make_block(0)) in make_group(make_block(0)).moments
    expert, other = (make_group(block, layer.weights[0], statistics) for block in (make_block(0), dense))
    assert expert.curve() == other.curve()


def seen_loss(layer: Layer, expert: int, ranks: dict[str, int]) -> float:
    """½ tr(G E[δ δᵀ]) of a solution on the tokens themselves, δ = p (f(m) − f̃(m))."""
    block, weights, routing_T1 = make_block(expert), layer.weights[expert], layer.routing_TE[:, expert, None]
    solution = make_group(block, weights, layer.statistics(expert)).solve(ranks)
    tensors = dict(solution.tensors)
    for reader in block.readers:
        if (second := tensors.get(f"{reader.role}.second.weight")) is not None:
            tensors[reader.weight_key] = second @ tensors[f"{block.readers[0].role}.first.weight"]
    left_TD = layer.hidden(weights, block) * routing_T1 @ weights[block.writer.weight_key].T
    left_TD -= layer.hidden(tensors, block) * routing_T1 @ tensors[block.writer.weight_key].T
    return 0.5 * float((left_TD.T @ left_TD / TOKENS * layer.metric_DD).sum())


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_losses_are_those_of_the_weighted_outputs(expert: int) -> None:
    layer = Layer()
    solver = Solver(make_group(make_block(expert), layer.weights[expert], layer.statistics(expert)), 1)
    for width in (8, 16, 24):
        seen = seen_loss(layer, expert, {"width": width, "gate_up": HIDDEN, "down": HIDDEN})
        assert seen == pytest.approx(float(solver.width_losses[width]), rel=1e-6)


def test_few_channels_are_solved_by_eigenproblems_of_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of fewer channels than half the hidden size: the same curve and solution as by those of its order."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 8)
    layer = Layer()
    narrow = points_of(layer, 0, layer.statistics(0))
    group = make_group(make_block(0), layer.weights[0], layer.statistics(0))
    ranks = {"width": 6, "gate_up": 5, "down": 3}
    thin = group.solve(ranks)
    monkeypatch.setattr(Solver, "narrow", False)
    whole = points_of(layer, 0, layer.statistics(0))
    thick = group.solve(ranks)
    assert [point.ranks for point in narrow] == [point.ranks for point in whole]
    for one, other in zip(narrow, whole, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-12)
    for role in ("gate", "up", "down"):
        first = "gate" if role == "up" else role
        one, other = (
            each.tensors[f"experts.0.{role}.second.weight"] @ each.tensors[f"experts.0.{first}.first.weight"]
            for each in (thin, thick)
        )
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_losses_of_ranks_are_measured_on_the_weighted_outputs() -> None:
    layer = Layer()
    points = [p for p in points_of(layer, 1, layer.statistics(1)) if p.ranks["gate_up"] < HIDDEN and p.loss > 1e-3]
    assert len(points) > 5
    for point in points[:: len(points) // 5]:
        full = {**point.ranks, "down": HIDDEN}
        assert seen_loss(layer, 1, full) < 2.0 * point.loss


def test_the_share_of_an_expert_scales_what_is_measured() -> None:
    """Tokens that other experts serve dilute losses, and change nothing else."""
    layer, block = Layer(), make_block(0)
    statistics = layer.statistics(0)
    idle = torch.zeros_like(layer.inputs_TD)
    diluted = {
        **statistics.moments,
        sample_of(block): torch.cat((layer.inputs_TD, idle))[None],
        routing_sample(block): torch.cat((layer.routing_TE[:, 0], idle[:, 0]))[None, :, None],
    }
    for reader in block.readers:
        diluted[output_gradient(reader)] = statistics.moments[output_gradient(reader)]
    once = points_of(layer, 0, statistics)
    # Twice the tokens halve C_e, C_m and what is measured; halved moments of the input halve the linear prediction.
    twice = points_of(layer, 0, replace(statistics, moments=diluted, tokens=2 * TOKENS, factors={}))
    assert [point.ranks for point in once] == [point.ranks for point in twice]
    for one, other in zip(once, twice, strict=True):
        assert other.loss == pytest.approx(one.loss / 2, rel=1e-9, abs=1e-15)


def test_an_expert_without_sampled_tokens_is_predicted_linearly_and_solved() -> None:
    layer, block = Layer(), make_block(0)
    statistics = layer.statistics(0)
    unseen = {**statistics.moments, routing_sample(block): torch.zeros(1, TOKENS, 1, dtype=torch.float64)}
    statistics = replace(statistics, moments=unseen)
    points = points_of(layer, 0, statistics)
    solution = make_group(block, layer.weights[0], statistics).solve(points[len(points) // 2].ranks)
    assert all(torch.isfinite(tensor).all() for tensor in solution.tensors.values())
    assert "refit_tokens" not in solution.report


def test_weights_of_other_tokens_are_refused() -> None:
    layer, block = Layer(), make_block(0)
    statistics = layer.statistics(0)
    shorter = {**statistics.moments, routing_sample(block): layer.routing_TE[None, 1:, :1]}
    with pytest.raises(ValueError, match="599 routing weights for 600"):
        points_of(layer, 0, replace(statistics, moments=shorter))


def test_the_experts_of_a_layer_share_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, real, calls = Layer(), moments_module.factored, []
    monkeypatch.setattr(moments_module, "factored", lambda moment: calls.append(1) or real(moment))
    factors: dict[Moment, tuple[Tensor, object]] = {}
    input_total, metric_total = layer.input_total[None], layer.metric_total[None]
    for expert in range(EXPERTS):
        some, block = layer.statistics(expert, factors), make_block(expert)
        shared = {input_moment(block.readers[0]): input_total, output_gradient(block.writer): metric_total}
        points_of(layer, expert, replace(some, moments={**some.moments, **shared}))
    assert len(calls) == 2
