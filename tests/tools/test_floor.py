"""The floor of a job (`tools.benchmarks.floor`): operations by hand, and never more than the plan's."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.solve_work import solve_flops
from pipeline.cost_model.work import layer_work
from pipeline.families.geometry import Geometry
from pipeline.units.sharding import held_out_windows
from tests.families.geometries import llama, manifest
from tools.benchmarks.floor import Bare, Needed, floor_seconds, kept_ranks, needed

SAMPLES, LENGTH, KEEP = 20, 32, 0.8


def job(propagate: str) -> Manifest:
    cut = {"samples": SAMPLES, "sequence_length": LENGTH, "shards": 4, "propagate": propagate}
    return manifest(keep=KEEP, calibration={"text": {"files": ["text.txt"]}, **cut})


def flops(job: Manifest, geometry: Geometry, dtype: torch.dtype) -> dict[str, float]:
    """Of the products in this dtype, by phase."""
    found: dict[str, float] = defaultdict(float)
    for each in needed(job, geometry, torch.bfloat16):
        if each.bare.kind == "product" and each.bare.dtype == dtype:
            found[each.phase] += each.times * each.bare.flops
    return dict(found)


def per_token(length: int, value: int = 16, channels: int = 80) -> int:
    """Of a layer, D 48, N 80, H 4, G 2, d 16, and half of attention's square."""
    return 2 * 48 * (64 + 32 + 2 * value + 4 * value + 3 * channels) + length * 4 * (16 + value)


def test_operations_by_hand() -> None:
    geometry, tokens = llama(), 6 * SAMPLES * LENGTH
    dense, walked = job("dense"), job("compressed")
    kept = kept_ranks(geometry.layers[0], KEEP)
    assert flops(dense, geometry, torch.bfloat16) == {"statistics": tokens * per_token(LENGTH)}
    through_walk = per_token(LENGTH) - 2 * 48 * 80 + 5 / 6 * per_token(LENGTH, *kept)
    found = {"importance": tokens * per_token(LENGTH), "walk": tokens * through_walk}
    assert flops(walked, geometry, torch.bfloat16) == pytest.approx(found)
    windows = held_out_windows(SAMPLES, SAMPLES, LENGTH) * LENGTH
    scored = windows * (per_token(LENGTH) + per_token(LENGTH, *kept))
    scored += 128 * (per_token(128) + 2 * per_token(128, *kept))
    moments = tokens * (80**2 + 4 * 16**2)
    assert flops(dense, geometry, torch.float32) == {"statistics": moments, "score": 6 * scored}
    assert flops(walked, geometry, torch.float32) == {"walk": moments, "score": 6 * scored}


@pytest.mark.parametrize("propagate", ["dense", "compressed"])
def test_no_more_than_the_plan_counts(propagate: str) -> None:
    geometry, counted = llama(intermediate_size=160), job(propagate)
    work = layer_work(PlannedJob.of(counted, geometry), KEEP)
    phase = "walk" if propagate == "compressed" else "statistics"
    forward = 6 * work.forward_flops if propagate == "dense" else 6 * (work.statistics_flops + work.packed_flops)
    assert flops(counted, geometry, torch.bfloat16)[phase] <= forward
    single = flops(counted, geometry, torch.float32)
    assert single[phase] <= 6 * work.moment_flops
    assert single["score"] <= 6 * (sum(work.held_out_flops) + work.compare_flops)
    assert sum(flops(counted, geometry, torch.float64).values()) <= 6 * sum(map(solve_flops, work.solves))


def test_workers_share_what_is_computed_and_not_the_disk() -> None:
    bare = Bare("product", (1, 1, 1), torch.float)
    wanted = {Needed("statistics", bare, 8.0): 0.5, Needed("compress", bare, 2.0): 1.0}
    assert floor_seconds(wanted, {"compress": 300.0}, 100.0, 1) == {"statistics": 4.0, "compress": 3.0}
    assert floor_seconds(wanted, {"compress": 300.0}, 1000.0, 2) == {"statistics": 2.0, "compress": 1.0}


def test_a_bare_product_and_an_eigenproblem_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.benchmarks.floor.SECONDS", 1e-4)
    for bare in (Bare("product", (3, 2, 4), torch.bfloat16), Bare("product", (3, 2, 4), torch.double, 5)):
        assert 0 < bare.seconds() < 1
        assert bare._call()().shape[-2:] == (3, 4)
    assert 0 < Bare("eigen", (4,), torch.double, 2).seconds() < 1


def test_half_precision_may_be_multiplied_in_float32() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float), (torch.float, torch.float), (torch.double, torch.double)):
        assert Bare("product", (3, 2, 4), dtype, 5).wide() == Bare("product", (3, 2, 4), wide, 5)
