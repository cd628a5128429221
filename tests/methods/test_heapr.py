"""`heapr`: the predicted losses and the refit on tokens themselves, budgets, and nothing lost at the full width."""

from __future__ import annotations

import pytest
import torch

from pipeline.methods.method import Scores
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.registry import allocate_ranks, build_methods, task_groups
from pipeline.ranks.curves import from_columns
from tests.families.geometries import llama, manifest, other
from tests.methods.loss_aware_weights import make_statistics, make_weights

CALIBRATION = {"text": {"files": ["a.txt"]}, "propagate": "dense"}
GEOMETRIES = {"gqa": llama("gqa"), "biased": llama("biased"), "opt": other("opt")}


@pytest.mark.parametrize("name", list(GEOMETRIES))
@pytest.mark.parametrize("refit", [False, True])
def test_channels_stay_by_the_loss_of_each(name: str, refit: bool) -> None:
    where = GEOMETRIES[name]
    (method,) = build_methods(manifest({"method": "heapr", "refit": refit}, keep=0.8, calibration=CALIBRATION))
    group = next(group for group in method.claims(where) if group.layer == 0)
    weights, statistics, layer = make_weights(where, group.roles), make_statistics(where, group), where.layers[0]
    writer = layer.mlps[0].writer
    moment_NN, metric_DD = statistics.mean(input_moment(writer))[0], statistics.mean(output_gradient(writer))[0]
    down_DN = weights[writer.weight_key]
    losses_N = torch.tensor(
        [0.5 * moment_NN[j, j] * down_DN[:, j] @ metric_DD @ down_DN[:, j] for j in range(len(moment_NN))]
    )
    points = from_columns(group.with_data(weights, statistics).curve())  # type: ignore[attr-defined]  # it predicts
    point = points[len(points) // 2]
    gone = losses_N.argsort()[: len(losses_N) - point.ranks["width"]]
    assert point.loss == pytest.approx(float(losses_N[gone].sum()))
    solution = group.with_data(weights, statistics).solve(point.ranks)
    kept = [j for j in range(len(losses_N)) if j not in gone.tolist()]
    assert torch.equal(
        solution.tensors[layer.mlps[0].readers[0].weight_key], weights[layer.mlps[0].readers[0].weight_key][kept]
    )
    assert sum(tensor.numel() for tensor in solution.tensors.values()) == point.numbers
    written = solution.tensors[writer.weight_key]
    if not refit:
        assert torch.equal(written, down_DN[:, kept])
        return
    pull_Dk, inner_kk = down_DN @ moment_NN[:, kept], moment_NN[kept][:, kept]
    torch.testing.assert_close(written @ inner_kk, pull_Dk, rtol=1e-4, atol=1e-6 * float(pull_Dk.abs().max()))


def test_a_budget_ranks_the_channels_of_all_layers() -> None:
    where, job = GEOMETRIES["gqa"], manifest({"method": "heapr"}, keep=0.8, calibration=CALIBRATION)
    methods = build_methods(job)
    curves = {
        key: group.with_data(make_weights(where, group.roles), make_statistics(where, group, group.layer)).curve()
        for key, group in task_groups(methods, where).items()
    }
    ranks = allocate_ranks(job, methods, where, Scores(curves=curves))
    widths = [chosen["width"] for chosen in ranks.values()]
    layer = where.layers[0]
    stored = sum(layer.mlps[0].numbers(width) for width in widths)
    left = where.decoder_numbers() - len(widths) * layer.numbers(layer.mlps[0].roles)
    assert 0.79 < (stored + left) / where.decoder_numbers() <= 0.8


def test_the_whole_width_changes_nothing() -> None:
    where = GEOMETRIES["biased"]
    (method,) = build_methods(manifest({"method": "heapr", "refit": True}, keep=0.8, calibration=CALIBRATION))
    group = next(iter(method.claims(where)))
    weights, statistics = make_weights(where, group.roles), make_statistics(where, group)
    solution = group.with_data(weights, statistics).solve({"width": where.layers[0].mlps[0].width})
    assert not solution.forms
    assert all(torch.equal(solution.tensors[key], weight) for key, weight in weights.items())
