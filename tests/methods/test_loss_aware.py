"""loss_aware without any model: what it stores, what it predicts, and that nothing is lost at the full rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.methods import LossAware
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.kernels.sensitivity import pullback
from pipeline.methods.base import Group
from pipeline.methods.loss_aware import mlp as mlp_part
from pipeline.methods.loss_aware import mlp_solver
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.method import Moment, Scores, Solution, Statistics
from pipeline.methods.registry import (
    allocate_ranks,
    build_methods,
    claim_tasks,
    predict_tasks,
)
from pipeline.ranks.curves import Point, from_columns, predicted_loss
from tests.families.geometries import llama, manifest, other
from tests.methods.loss_aware_weights import TOKENS, counted, make_statistics, make_weights, rebuild
from tests.methods.test_by_loss import by_loss

pytestmark = pytest.mark.sample(3)

GEOMETRIES = {
    "mha": llama("mha"),
    "gqa": llama("gqa"),
    "mqa": llama("mqa"),
    "biased": llama("biased"),
    "wide-heads": llama("wide-heads"),
    "opt": other("opt"),
    "gptj": other("gptj"),
    "half": llama("gqa", bits=16),
    "single": llama("gqa", bits=32),
}
NAMES = ("query_key", "attention", "mlp")


def method_of(**entry: Any) -> LossAwareMethod:
    return LossAwareMethod(LossAware(method="loss_aware", **entry))


def group_of(method: LossAwareMethod, where: Geometry, name: str) -> Group[Any]:
    return next(group for group in method.claims(where) if (group.layer, group.name) == (0, name))


def curve_of(method: LossAwareMethod, where: Geometry, name: str) -> tuple[Group[Any], dict[str, Any], Statistics, Any]:
    group = group_of(method, where, name)
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    return group, weights, statistics, _points(method.entry, where, name)


@cache
def _points(entry: LossAware, where: Geometry, name: str) -> list[Point]:
    """The points of a group's curve, computed once for all tests."""
    method = LossAwareMethod(entry)
    group = group_of(method, where, name)
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    return from_columns(group.with_data(weights, statistics).curve())


def a_few(points: list[Point], count: int = 3) -> list[Point]:
    return points[:: max(1, len(points) // count)] + points[-1:]


def loss_of(change: torch.Tensor, moment: torch.Tensor, metric: torch.Tensor) -> float:
    return 0.5 * float((pullback(change, metric) * moment).sum())


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
@pytest.mark.parametrize("entry", [{}, {"factors": "plain"}, {"rank_multiple": 8, "weighting": "input"}])
def test_points_count_what_is_stored(geometry: str, name: str, entry: dict[str, Any]) -> None:
    where, method = GEOMETRIES[geometry], method_of(**entry)
    group, weights, statistics, points = curve_of(method, where, name)
    before = [tensor.clone() for tensor in (*weights.values(), *statistics.moments.values())]
    for point in a_few(points):
        solution = group.with_data(weights, statistics).solve(point.ranks)
        assert counted(solution, where.bits) == point.numbers, point
        assert set(solution.forms) <= set(group.roles)
        assert all(torch.isfinite(tensor).all() for tensor in solution.tensors.values())
    for tensor, copy in zip((*weights.values(), *statistics.moments.values()), before, strict=True):
        assert torch.equal(tensor, copy), "an input was changed"
    assert points[0].numbers <= group.least_numbers()
    multiple = method.entry.multiple(where.hidden)
    widest = {
        "query_key": where.hidden,
        "value": where.layers[0].attention.head_dim,
        "width": where.layers[0].mlps[0].width,
    }
    for key, rank in (item for point in points for item in point.ranks.items()):
        assert rank % multiple == 0 or rank == widest.get(key, rank), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_the_last_point_is_the_dense_layer(geometry: str, name: str) -> None:
    where, method = GEOMETRIES[geometry], method_of()
    group, weights, statistics, points = curve_of(method, where, name)
    assert (points[-1].loss, points[-1].numbers) == (0.0, where.layers[0].numbers(group.roles))
    solution = group.with_data(weights, statistics).solve(points[-1].ranks)
    assert solution.forms == {}
    assert solution.report == {"dense": True}
    assert solution.tensors.keys() == weights.keys()
    assert all(torch.equal(solution.tensors[key], weights[key]) for key in weights)
    losses, numbers = [point.loss for point in points], [point.numbers for point in points]
    assert losses == sorted(losses, reverse=True)
    assert numbers == sorted(numbers)


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [{}, {"factors": "plain"}, {"weighting": "input"}])
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_query_key_loses_what_its_point_says(geometry: str, entry: dict[str, Any]) -> None:
    where, method = GEOMETRIES[geometry], method_of(**entry)
    group = group_of(method, where, "query_key")
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    metric = torch.rand(sum(where.layers[0].weight_shape(role)[0] for role in group.roles), dtype=torch.float64)
    stacked = torch.cat([weights["q.weight"], weights["k.weight"]])
    pull = Moment("pull:q+k", kind="gradient")
    statistics = replace(statistics, moments={**statistics.moments, pull: pullback(stacked, metric)[None]})
    input_DD = statistics.mean(Moment("attention.in"))[0]
    for point in a_few(from_columns(group.with_data(weights, statistics).curve())):
        again = rebuild(group.with_data(weights, statistics).solve(point.ranks), where, weights)
        change = stacked - torch.cat([again["q"], again["k"]])
        assert loss_of(change, input_DD, metric) == pytest.approx(point.loss, rel=1e-5, abs=1e-9)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("entry", [{}, {"weighting": "input"}])
@pytest.mark.parametrize("geometry", ["mha", "gqa", "mqa", "biased", "opt"])
def test_values_lose_what_their_point_says(geometry: str, entry: dict[str, Any]) -> None:
    where, method = GEOMETRIES[geometry], method_of(**entry)
    group, weights, statistics, points = curve_of(method, where, "attention")
    context_FF = statistics.mean(Moment("o.in"))[0]
    metric_DD = statistics.mean(Moment("mid", kind="gradient"))[0]
    seen = 0
    for point in a_few(points, 12):
        again = rebuild(group.with_data(weights, statistics).solve(point.ranks), where, weights)
        value, effective = where.layers[0].attention.head_dim, again["o"]
        if point.ranks["value"] < value:
            # o · v is all that counts: what reaches the output of each context is o times the basis of its head.
            flat = torch.linalg.lstsq(weights["v.weight"].T, again["v"].T).solution.T
            heads = flat.view(where.layers[0].attention.kv_heads, value, where.layers[0].attention.kv_heads, value)
            blocks = [
                heads[g, :, g]
                for g in range(where.layers[0].attention.kv_heads)
                for _ in range(where.layers[0].attention.heads // where.layers[0].attention.kv_heads)
            ]
            effective = effective @ torch.block_diag(*blocks)
            seen += 1
        change = weights["o.weight"] - effective
        lost = loss_of(change, context_FF, metric_DD)
        assert 0.93 * point.loss - 1e-7 <= lost <= 1.001 * point.loss + 1e-7  # a solve fits on where a curve stops
    assert seen > 1


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("geometry", ["gqa", "biased", "opt"])
def test_down_loses_what_its_point_says(geometry: str) -> None:
    """With gate and up whole; the channels that stay come first in what is rebuilt, so their order is found again."""
    where, method = GEOMETRIES[geometry], method_of(widths=5)
    group, weights, statistics, _ = curve_of(method, where, "mlp")
    hidden_NN, metric_DD = statistics.mean(Moment("down.in"))[0], statistics.mean(Moment("out", kind="gradient"))[0]
    readers = len(group.roles) - 1
    everything = from_columns(group.with_data(weights, statistics).curve())
    widths = sorted({point.ranks["width"] for point in everything})
    assert len(widths) > 1
    seen = 0
    for width, down in itertools.product(widths, range(3, where.hidden + 1, 3)):
        ranks = {"width": width, "gate_up": min(readers * width, where.hidden), "down": min(down, width)}
        solution = group.with_data(weights, statistics).solve(ranks)
        again = rebuild(solution, where, weights)
        rows = [int((weights["up.weight"] == row).all(dim=1).nonzero()[0, 0]) for row in again["up"][:width]]
        change = weights["down.weight"].clone()
        change[:, rows] -= again["down"][:, :width]
        lost = loss_of(change, hidden_NN, metric_DD)
        same = [point.loss for point in everything if point.ranks == ranks]
        assert all(lost == pytest.approx(loss, rel=1e-5, abs=1e-9) for loss in same)
        seen += len(same)
    assert seen > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_in_the_metric_costs_less_than_without(name: str) -> None:
    where = GEOMETRIES["gqa"]
    lines = {kind: curve_of(method_of(weighting=kind), where, name)[3] for kind in ("loss", "input")}
    for point in a_few(lines["input"]):
        rivals = [rival.loss for rival in lines["loss"] if rival.numbers <= point.numbers]
        assert not rivals or min(rivals) <= point.loss * (1 + 1e-6) + 1e-9 or name == "mlp"
    middle = [line[len(line) // 2] for line in lines.values()]
    assert middle[0].loss < middle[1].loss


def test_down_is_fitted_again_to_what_gate_and_up_give() -> None:
    where, method = GEOMETRIES["biased"], method_of()
    group = group_of(method, where, "mlp")
    weights, statistics = consistent(where, group)
    ranks = {"width": 60, "gate_up": 20, "down": where.hidden}
    solution = group.with_data(weights, statistics).solve(ranks)
    assert solution.report["refit_tokens"] == TOKENS
    blind = {m: t[:, :8] if m.kind == "sample" else t for m, t in statistics.moments.items()}
    without = group.with_data(weights, replace(statistics, moments=blind)).solve(ranks)
    assert "refit_tokens" not in without.report
    errors = []
    for found in (solution, without):
        again = {**weights, **{f"{role}.weight": w for role, w in rebuild(found, where, weights).items()}}
        biases = {
            key: torch.zeros(where.layers[0].mlps[0].width, dtype=torch.float64) for key in ("gate.bias", "up.bias")
        }
        for key, bias in biases.items():
            bias[:60] = found.tensors[key]
        sample_TD = next(t for m, t in statistics.moments.items() if m.kind == "sample")[0]
        left = mlp(weights, sample_TD) - mlp({**again, **biases}, sample_TD)
        errors.append(float(left.square().sum()))
    assert errors[0] < 0.95 * errors[1]


def test_ranks_below_those_that_were_looked_at_are_not_free() -> None:
    """Where nothing is seen to be lost at the smallest probed rank, no smaller one is promised to lose nothing."""
    layer = GEOMETRIES["gqa"].layers[0]
    entry = method_of(widths=1).entry
    linear = torch.linspace(8.0, 0.0, layer.hidden + 1, dtype=torch.float64)
    piece = mlp_part.Piece(readers=linear.tolist(), writer=[0.0] * (layer.hidden + 1), bends=[0.0, 0.0, 0.0])
    begun = mlp_part.EliminatedChannels(
        order=list(range(layer.mlps[0].width)), losses=[0.0], probed=[layer.mlps[0].width]
    )
    group = mlp_part.mlp_group(entry, layer, layer.mlps[0], corrects=False)
    by_rank = {p.ranks["gate_up"]: p.loss for p in from_columns(group.join_curve(begun, [piece]))}
    smallest = min(group.probed_ranks(layer.mlps[0].width))
    assert by_rank[smallest] == 0.0
    assert by_rank[1] > 0.5 * float(linear[1])
    assert by_rank[smallest - 1] > 0.0


@pytest.mark.parametrize("weighting", ["loss", "input"])
def test_the_hint_of_a_curve_changes_no_bit_of_a_solution(weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which channels stay: the solution has the same bits, at a width of the curve and beside it."""
    where, method = GEOMETRIES["biased"], method_of(weighting=weighting)
    group, layer = group_of(method, where, "mlp"), where.layers[0]
    weights, statistics = consistent(where, group)
    curve = group.with_data(weights, statistics).curve()
    hinted = replace(statistics, hint=curve.hint)
    points = a_few(from_columns(curve))
    expected = [group.with_data(weights, statistics).solve(point.ranks) for point in points]
    beside = {"width": layer.mlps[0].width - 1, "gate_up": 20, "down": 20}
    assert_same(
        group.with_data(weights, hinted).solve(beside),
        group.with_data(weights, statistics).solve(beside),
    )
    monkeypatch.setattr(mlp_solver, "eliminate", None)
    assert len({point.ranks["width"] for point in points}) > 1
    for point, plain in zip(points, expected, strict=True):
        assert_same(group.with_data(weights, hinted).solve(point.ranks), plain)


def assert_same(found: Solution, expected: Solution) -> None:
    assert found.forms == expected.forms
    assert found.report == expected.report
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[key], expected.tensors[key]) for key in expected.tensors)


def test_fewer_channels_are_fitted_on_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    where, method = GEOMETRIES["biased"], method_of()
    group = group_of(method, where, "mlp")
    weights, statistics = consistent(where, group)
    monkeypatch.setattr(mlp_solver, "sampled", lambda width: 4 * width if width < 80 else 65_536)
    ranks = {"width": 60, "gate_up": 20, "down": where.hidden}
    solution = group.with_data(weights, statistics).solve(ranks)
    assert solution.report["refit_tokens"] == 240 < TOKENS
    whole = group.with_data(weights, statistics).solve({**ranks, "width": 80})
    assert whole.report["refit_tokens"] == TOKENS


def test_the_curve_of_an_mlp_sees_what_its_activation_bends() -> None:
    """Gate and up at a low rank: the loss of the solution on the sample itself, against the point's."""
    where, method = GEOMETRIES["biased"], method_of()
    group = group_of(method, where, "mlp")
    weights, statistics = consistent(where, group)
    metric_DD = statistics.mean(Moment("out", kind="gradient"))[0]
    sample_TD = next(t for m, t in statistics.moments.items() if m.kind == "sample")[0]
    points = from_columns(group.with_data(weights, statistics).curve())
    checked = [p for p in points if p.ranks["width"] == 80 and p.ranks["gate_up"] < 40]
    assert checked
    for point in a_few(checked):
        again = rebuild(group.with_data(weights, statistics).solve(point.ranks), where, weights)
        left = mlp(weights, sample_TD) - mlp({**weights, **{f"{r}.weight": w for r, w in again.items()}}, sample_TD)
        seen = 0.5 * float((left.T @ left / TOKENS * metric_DD).sum())
        assert 0.6 < point.loss / seen < 1.6, point


def mlp(weights: dict[str, torch.Tensor], inputs_TD: torch.Tensor) -> torch.Tensor:
    gate = inputs_TD @ weights["gate.weight"].T + weights["gate.bias"]
    up = inputs_TD @ weights["up.weight"].T + weights["up.bias"]
    return torch.nn.functional.silu(gate) * up @ weights["down.weight"].T


def consistent(where: Geometry, group: Group[Any]) -> tuple[dict[str, torch.Tensor], Statistics]:
    """Weights, and moments of what they make of the sample; the sample is all the tokens there are."""
    weights, some = make_weights(where, group.roles), make_statistics(where, group)
    sample = next(m for m in group.moments if m.kind == "sample")
    sample_TD = some.moments[sample][0] / some.moments[sample][0].std()
    gate = sample_TD @ weights["gate.weight"].T + weights["gate.bias"]
    up = sample_TD @ weights["up.weight"].T + weights["up.bias"]
    hidden = torch.nn.functional.silu(gate) * up
    values = {"mlp.in": sample_TD.T @ sample_TD, "down.in": hidden.T @ hidden}
    exact = {m: values[m.point][None] for m in group.moments if m.kind == "value"}
    return weights, replace(some, moments={**some.moments, **exact, sample: sample_TD[None]})


# -- odd statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["value", "gradient", "both"])
def test_moments_of_zero(name: str, kind: str) -> None:
    where, method = GEOMETRIES["gqa"], method_of()
    group = group_of(method, where, name)
    weights, some = make_weights(where, group.roles), make_statistics(where, group)
    moments = {m: torch.zeros_like(t) if kind in (m.kind, "both") else t for m, t in some.moments.items()}
    statistics = replace(some, moments=moments)
    points = from_columns(group.with_data(weights, statistics).curve())
    assert all(point.loss == 0.0 for point in points)
    solution = group.with_data(weights, statistics).solve(points[0].ranks)
    assert all(torch.isfinite(tensor).all() for tensor in solution.tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_fewer_tokens_than_features(name: str) -> None:
    where, method = GEOMETRIES["gqa"], method_of()
    group = group_of(method, where, name)
    weights, some = make_weights(where, group.roles), make_statistics(where, group)
    thin = {}
    for moment, tensor in some.moments.items():
        if moment.kind == "sample":
            thin[moment] = tensor[:, :5]
            continue
        values = torch.randn(5, tensor.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        thin[moment] = values.square().sum(dim=0)[None] if moment.diagonal else (values.T @ values)[None]
    statistics = replace(some, moments=thin)
    for point in a_few(from_columns(group.with_data(weights, statistics).curve())):
        solution = group.with_data(weights, statistics).solve(point.ranks)
        assert all(torch.isfinite(tensor).all() for tensor in solution.tensors.values())
        assert (
            max(float(tensor.abs().max()) for tensor in solution.tensors.values() if tensor.is_floating_point()) < 1e6
        )


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_refused(name: str) -> None:
    where, method = GEOMETRIES["gqa"], method_of()
    group = group_of(method, where, name)
    weights, some = make_weights(where, group.roles), make_statistics(where, group)
    for bad in group.moments:
        moments = {**some.moments, bad: torch.full_like(some.moments[bad], float("nan"))}
        with pytest.raises(ValueError, match="NaN"):
            group.with_data(weights, replace(some, moments=moments)).curve()


# -- in a job ----------------------------------------------------------------------------------------------------------


def loss_aware_job(*entries: dict[str, Any], keep: float | None = 0.6) -> Manifest:
    return by_loss(*({"method": "loss_aware", **entry} for entry in entries), keep=keep)


def curves_of(manifest: Manifest, where: Geometry) -> dict[str, Any]:
    methods = build_methods(manifest)
    found = {}
    for task in predict_tasks(methods, where):
        method = methods[task.method]
        assert isinstance(method, LossAwareMethod)
        weights = make_weights(where, task.roles, seed=task.layer)
        statistics = make_statistics(where, task, seed=task.layer)
        found[task.key] = method.group(task, where.layers[task.layer]).with_data(weights, statistics).curve()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("entries", "keep"),
    [
        pytest.param(({},), 0.9, marks=pytest.mark.nightly),
        (({},), 0.6),
        pytest.param(({},), 0.3, marks=pytest.mark.nightly),
        pytest.param(({"query_key": False, "layers": "last:2"},), 0.9, marks=pytest.mark.slow),
        pytest.param(({"layers": [0], "keep": 0.5}, {"layers": [1, 2]}), 0.8, marks=pytest.mark.slow),
        (({"layers": [0], "keep": 0.5}, {"layers": [1, 2]}), 0.4),
    ],
)
def test_budgets_are_met_exactly(entries: tuple[dict[str, Any], ...], keep: float) -> None:
    where, manifest = llama("gqa", num_hidden_layers=3), loss_aware_job(*entries, keep=keep)
    curves = curves_of(manifest, where)
    methods = build_methods(manifest)
    ranks = allocate_ranks(manifest, methods, where, Scores(curves=curves))
    tasks = claim_tasks(methods, where)
    assert ranks.keys() == {task.key for task in tasks}
    total = where.scope_numbers("decoder")
    stored = total - sum(where.layers[0].numbers(task.roles) for task in tasks)
    for task in tasks:
        chosen = ranks[task.key]
        stored += next(p.numbers for p in from_columns(curves[task.key]) if dict(p.ranks) == chosen)
    assert 0.995 * keep * total < stored <= keep * total
    assert predicted_loss(curves, ranks) > 0.0


def test_before_curves_are_taken_only_the_reach_is_checked() -> None:
    where = llama("gqa")
    assert allocate_ranks(loss_aware_job({}), build_methods(loss_aware_job({})), where, Scores()) == {}
    tight = loss_aware_job({}, keep=0.01)
    with pytest.raises(InputError, match=r"budget\.keep: 0\.01 leaves .* reachable is 0\.[0-9]+ to 1"):
        allocate_ranks(tight, build_methods(tight), where, Scores())


@pytest.mark.slow
def test_more_budget_never_costs_more() -> None:
    where = llama("gqa", num_hidden_layers=2)
    curves = curves_of(loss_aware_job({}), where)
    losses = []
    for keep in (0.3, 0.5, 0.7, 0.9, 1.0):
        manifest = loss_aware_job({}, keep=keep)
        ranks = allocate_ranks(manifest, build_methods(manifest), where, Scores(curves=curves))
        losses.append(predicted_loss(curves, ranks))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0.0


def test_entries_that_share_a_budget_go_by_the_same() -> None:
    job = by_loss({"method": "loss_aware", "mlp": False}, {"method": "flat_llm", "attention": False}, keep=0.6)
    with pytest.raises(InputError, match=r"methods\.1: shares a budget with methods\.0, whose ranks follow predicted"):
        allocate_ranks(job, build_methods(job), llama("gqa"), Scores(dict.fromkeys(range(6), 1.0)))


def test_off_parts_are_not_claimed() -> None:
    where = llama("gqa")
    for name in NAMES:
        method = method_of(**{name: False})
        assert {group.name for group in method.claims(where)} == set(NAMES) - {name}
    with pytest.raises(ValueError, match="all off"):
        method_of(query_key=False, attention=False, mlp=False)


@pytest.mark.parametrize("calibration", [None, {"text": {"files": ["a.txt"]}, "propagate": "compressed"}])
def test_text_and_dense_statistics_are_needed(calibration: dict[str, Any] | None) -> None:
    wanted = "calibration is needed" if calibration is None else r"set calibration\.propagate: dense"
    with pytest.raises(InputError, match=rf"methods\.0 \(loss_aware\) follows .*{wanted}"):
        manifest({"method": "loss_aware"}, keep=0.6, calibration=calibration)
