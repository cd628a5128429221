"""flat_llm, lorc and joint_rank_k by predicted loss: what their curves say, and that budgets are shared by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.records import Curve
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.kernels.sensitivity import pullback
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Moment, Scores, Statistics
from pipeline.methods.registry import allocate_ranks, build_methods, predict_tasks
from pipeline.ranks.curves import from_columns
from tests.families.geometries import llama, manifest, other
from tests.methods.loss_aware_weights import make_statistics, make_weights
from tests.methods.tucker_weights import rebuild as tucker_weights

pytestmark = pytest.mark.sample(3)

GEOMETRIES = {"mha": llama("mha"), "gqa": llama("gqa"), "biased": llama("biased"), "opt": other("opt")}


def by_loss(*entries: dict[str, Any], keep: float | None = 0.7) -> Manifest:
    """Return a manifest with statistics of the dense model."""
    return manifest(*entries, keep=keep, calibration={"text": {"files": ["a.txt"]}, "propagate": "dense"})


def problem(
    entry: dict[str, Any], where: Geometry, name: str
) -> tuple[Method[Any], Group[Any], dict[str, torch.Tensor], Statistics]:
    """A group of layer 0; pulled gradients are those of a metric of the outputs, one number for each."""
    (method,) = build_methods(by_loss(entry))
    group = next(group for group in method.claims(where) if (group.layer, group.name) == (0, name))
    weights, found = make_weights(where, group.roles), make_statistics(where, group)
    moments = dict(found.moments)
    for moment in moments:
        if moment.point.startswith("pull:"):
            roles = moment.point.removeprefix("pull:").split("+")
            moments[moment] = sum(pullback(weights[f"{r}.weight"], metric_of(where, r)) for r in roles)[None]  # type: ignore[index]
    return method, group, weights, replace(found, moments=moments)


def compute_curves(methods: Sequence[Method[Any]], where: Geometry) -> dict[str, Curve]:
    """The curves of all groups whose ranks follow predicted loss, by the keys of their tasks."""
    curves = {}
    for task in predict_tasks(methods, where):
        method = methods[task.method]
        weights, statistics = make_weights(where, task.roles, task.layer), make_statistics(where, task, task.layer)
        curves[task.key] = method.group(task, where.layers[task.layer]).with_data(weights, statistics).curve()
    return curves


def metric_of(where: Geometry, role: str) -> torch.Tensor:
    return torch.linspace(0.1, 2.0, where.layers[0].weight_shape(role)[0], dtype=torch.float64)


CASES = [
    ("lorc", "key", {"weighting": weighting}) for weighting in ("none", "input", "loss")
] + [
    ("joint_rank_k", name, {"weighting": weighting, "query_key": form, "mlp": form})
    for name in ("query_key", "mlp")
    for weighting in ("none", "input", "loss")
    for form in ("joint", "separate")
]  # fmt: skip


@pytest.mark.parametrize("geometry", ["gqa", "biased"])
@pytest.mark.parametrize(("kind", "name", "entry"), CASES)
def test_low_rank_curves_say_what_is_lost_and_stored(
    geometry: str, kind: str, name: str, entry: dict[str, Any]
) -> None:
    where = GEOMETRIES[geometry]
    _, group, weights, statistics = problem({"method": kind, "allocation": "loss", **entry}, where, name)
    points = from_columns(group.with_data(weights, statistics).curve())
    assert (points[-1].loss, points[-1].numbers) == (0.0, where.layers[0].numbers(group.roles))
    moment = Moment("mlp.in" if name == "mlp" else "attention.in")
    input_DD = statistics.mean(moment)[0]
    for point in points[:: max(1, len(points) // 6)]:
        solution = group.with_data(weights, statistics).solve(point.ranks)
        assert sum(tensor.numel() for tensor in solution.tensors.values()) == point.numbers
        lost = 0.0
        owner = None
        for role in group.roles:
            owner = role if f"{role}.first.weight" in solution.tensors else owner
            if role not in solution.forms:
                continue
            again = solution.tensors[f"{role}.second.weight"] @ solution.tensors[f"{owner}.first.weight"]
            change = weights[f"{role}.weight"] - again
            lost += 0.5 * float((pullback(change, metric_of(where, role)) * input_DD).sum())
        assert lost == pytest.approx(point.loss, rel=1e-4, abs=1e-7)
        if name != "mlp" and kind == "lorc":
            assert point.cache == (
                point.ranks["key"]
                if solution.forms
                else where.layers[0].attention.kv_heads * where.layers[0].attention.head_dim
            )


@pytest.mark.parametrize("name", ["key", "query_key", "mlp"])
def test_the_metric_of_the_loss_loses_least(name: str) -> None:
    kind = "lorc" if name == "key" else "joint_rank_k"
    lines = {}
    for weighting in ("none", "input", "loss"):
        entry = {"method": kind, "allocation": "loss", "weighting": weighting}
        _, group, weights, statistics = problem(entry, GEOMETRIES["gqa"], name)
        curve = group.with_data(weights, statistics).curve()
        lines[weighting] = {point.numbers: point.loss for point in from_columns(curve)}
    for rival in ("none", "input"):
        shared = lines[rival].keys() & lines["loss"].keys()
        assert len(shared) > 3
        assert all(lines["loss"][at] <= lines[rival][at] * (1 + 1e-9) + 1e-12 for at in shared)
        assert any(lines["loss"][at] < 0.995 * lines[rival][at] for at in shared)


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
@pytest.mark.parametrize("weighting", ["none", "output", "loss"])
@pytest.mark.parametrize("choice", [{"basis": "value", "selection": "leverage"}, {"basis": "context"}])
def test_flat_llm_curves_say_what_is_lost_and_stored(geometry: str, weighting: str, choice: dict[str, str]) -> None:
    where = GEOMETRIES[geometry]
    entry = {"method": "flat_llm", "allocation": "loss", "weighting": weighting, **choice}
    for name, after in (("attention", "mid"), ("mlp", "out")):
        _, group, weights, statistics = problem(entry, where, name)
        points = from_columns(group.with_data(weights, statistics).curve())
        assert (points[-1].loss, points[-1].numbers) == (0.0, where.layers[0].numbers(group.roles))
        metric_DD = statistics.mean(Moment(after, kind="gradient"))[0]
        for point in points[:: max(1, len(points) // 5)]:
            solution = group.with_data(weights, statistics).solve(point.ranks)
            assert sum(tensor.numel() for tensor in solution.tensors.values()) == point.numbers
            if name == "mlp":
                rows = [
                    int((weights["up.weight"] == row).all(1).nonzero()[0, 0]) for row in solution.tensors["up.weight"]
                ]
                change = weights["down.weight"].clone()
                change[:, rows] -= solution.tensors["down.weight"]
                moment_FF = statistics.mean(Moment("down.in"))[0]
            else:
                change = weights["o.weight"] - effective_output(solution.tensors, weights, where)
                moment_FF = statistics.mean(Moment("o.in"))[0]
            lost = 0.5 * float((pullback(change, metric_DD) * moment_FF).sum())
            assert lost == pytest.approx(point.loss, rel=1e-4, abs=1e-6)


def effective_output(
    tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], where: Geometry
) -> torch.Tensor:
    """What reaches the output of each head's dense context: o times the basis of its head."""
    groups, per_group = (
        where.layers[0].attention.kv_heads,
        where.layers[0].attention.heads // where.layers[0].attention.kv_heads,
    )
    dense = weights["v.weight"].view(groups, where.layers[0].attention.head_dim, -1)
    small = tensors["v.weight"].view(groups, -1, where.hidden)
    bases = [torch.linalg.lstsq(dense[g].T, small[g].T).solution.T for g in range(groups) for _ in range(per_group)]
    return tensors["o.weight"] @ torch.block_diag(*bases)


@pytest.mark.slow
def test_three_methods_share_a_budget_by_loss() -> None:
    where = llama("gqa", num_hidden_layers=3)
    entries = (
        {"method": "flat_llm", "allocation": "loss", "attention": False},
        {"method": "joint_rank_k", "allocation": "loss", "mlp": False, "weighting": "loss"},
        {"method": "loss_aware", "query_key": False, "mlp": False},
    )
    job = by_loss(*entries, keep=0.7)
    methods = build_methods(job)
    curves = compute_curves(methods, where)
    assert allocate_ranks(job, methods, where, Scores()) == {}
    ranks = allocate_ranks(job, methods, where, Scores(curves=curves))
    assert ranks.keys() == curves.keys()
    total = where.scope_numbers("decoder")
    stored = total - sum(where.layers[0].numbers(task.roles) for task in predict_tasks(methods, where))
    for key, curve in curves.items():
        stored += next(point.numbers for point in from_columns(curve) if dict(point.ranks) == ranks[key])
    assert 0.99 * 0.7 * total < stored <= 0.7 * total


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_cache_is_shared_by_loss(share: float) -> None:
    where = llama("mha", num_hidden_layers=3)
    job = by_loss({"method": "lorc", "cache_keep": share, "allocation": "loss", "weighting": "loss"}, keep=None)
    methods = build_methods(job)
    curves = compute_curves(methods, where)
    ranks = allocate_ranks(job, methods, where, Scores(curves=curves))
    dense = where.layers[0].attention.kv_heads * where.layers[0].attention.head_dim
    cached = [min(dense, rank) for found in ranks.values() for rank in found.values()]
    assert share * 6 * dense - 2 < sum(cached) <= share * 6 * dense
    assert share == 1.0 or len(set(cached)) > 1


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({"method": "flat_llm", "allocation": "loss", "query_key": "head_pca"}, "head_pca has no prediction"),
        ({"method": "flat_llm", "allocation": "loss", "ranks": {"mlp": 3}}, "`ranks` or allocation: loss"),
        ({"method": "joint_rank_k", "allocation": "loss", "query_key": "joint_per_head"}, "joint_per_head has no"),
        ({"method": "joint_rank_k", "allocation": "loss", "ranks": {"query_key": 3, "mlp": 3}}, "`ranks` or alloc"),
        ({"method": "lorc", "allocation": "loss", "skip_above": 3.0}, "skip_above goes with allocation: progressive"),
    ],
)
def test_what_does_not_go_together(entry: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        by_loss(entry)


# -- lestd -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["mha", "gqa", "opt"])
@pytest.mark.parametrize(
    "entry", [{"target": "attention"}, {"target": "attention", "weighting": "input"}, {"target": "mlp"}]
)
def test_lestd_curves_say_what_is_lost(geometry: str, entry: dict[str, Any]) -> None:
    where, name = GEOMETRIES[geometry], entry["target"]
    method, group, weights, statistics = problem(
        {"method": "lestd", "allocation": "loss", "refine_sweeps": 0, **entry}, where, name
    )
    points = from_columns(group.with_data(weights, statistics).curve())
    losses = [point.loss for point in points]
    assert losses[-1] == 0.0
    assert losses[0] > 2 * losses[len(losses) // 2] > 0.0
    reads = {"o": "o.in", "down": "down.in", "gate": "mlp.in", "up": "mlp.in"}
    after = {"o": "mid", "down": "out"}
    for point in (points[2], points[len(points) // 3], points[len(points) // 2]):
        again = tucker_weights(group.with_data(weights, statistics).solve(point.ranks), where, group)
        lost = 0.0
        for role in group.roles:
            diagonal = Moment(f"{role}.out", kind="gradient", diagonal=True)
            metric = Moment(after[role], kind="gradient") if role in after else diagonal
            change = weights[f"{role}.weight"] - again[f"{role}.weight"]
            moment_FF = statistics.mean(Moment(reads.get(role, "attention.in")))[0]
            lost += 0.5 * float((pullback(change, statistics.mean(metric)[0]) * moment_FF).sum())
        assert lost == pytest.approx(point.loss, rel=0.25)  # between the sizes that were solved, it is interpolated
    assert len(method.predicts(where)) == where.num_layers


def test_lestd_by_loss_goes_with_sizes_of_layers() -> None:
    with pytest.raises(InputError, match="allocation: loss gives each layer a size of its own"):
        by_loss({"method": "lestd", "allocation": "loss", "threshold": "model"})
