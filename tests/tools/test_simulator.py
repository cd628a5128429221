"""The simulator on jobs small enough to add up by hand, and the plan's closed form against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.cost_model.phases import (
    START_SECONDS,
    PlannedPasses,
    add_seconds,
    collect_seconds,
    held_out_seconds,
    object_store_bytes,
    pair_seconds,
    phase_seconds,
    solve_seconds,
)
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.work import LayerWork, layer_work
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.methods.work import Work
from tests.families.geometries import llama, manifest
from tools.simulate import geometry, work_of
from tools.simulator.job_units import job_units
from tools.simulator.simulator import Failure, Unit, simulate

RATES = Rates(
    products=100,
    backward=100,
    moments=100,
    single=50,
    double=10,
    factors=10,
    eigen=10,
    memory=1e9,
    link=50,
    network=20,
    disk=1000,
    digest=1e9,
    step_s=0.5,
    column_s=0.1,
    commit_s=0.0,
    workers_per_node=2,
)
WORK = LayerWork(
    weight_bytes=100, decoded_bytes=100, largest_bytes=60, written_bytes=80, hidden_bytes=0, forward_flops=800,
    statistics_flops=400,
    packed_flops=600, moment_flops=400, added_bytes=0, cosine_bytes=0, moment_bytes=200, gradient_flops=0,
    solves=(Work(30, steps=2), Work(10)),
)  # fmt: skip


def shards(count: int, layer: int = 0, after: tuple[str, ...] = (), summed: str | None = None) -> list[Unit]:
    return [Unit(f"{layer}/{s}", "forward", 2.0, after, shard=s, summed=summed) for s in range(count)]


def test_units_are_spread_and_waited_for() -> None:
    found = simulate([*shards(5), Unit("all", "solve", 1.0, tuple(f"0/{s}" for s in range(5)))], workers=2)
    assert found.seconds == 3 * 2.0 + 1.0
    assert dict(found.busy) == {"forward": 10.0, "solve": 1.0}
    assert found.idle_share == pytest.approx(1 - 11 / 14)
    with pytest.raises(ValueError, match="1 units wait forever, such as lonely"):
        simulate([Unit("lonely", "solve", 1.0, ("nothing",))], 1)


def test_a_worker_goes_on_with_its_shards() -> None:
    """Layer 1's shard 0 takes long; nobody takes shard 1 from a worker that has no more than it."""
    units = [*shards(2), Unit("1/0", "forward", 9.0, ("0/0",), shard=0), Unit("1/1", "forward", 1.0, ("0/1",), shard=1)]
    units.append(Unit("2/1", "forward", 1.0, ("1/1",), shard=1))
    assert simulate(units, 2).seconds == 11.0


def test_transfers_of_a_place_come_one_after_another_beside_the_computing() -> None:
    units = [Unit(f"read {n}", "read", 3.0, on="disk 0") for n in range(2)]
    units += [Unit("compute", "solve", 5.0, ("read 0",)), Unit("other", "read", 1.0, on="disk 1")]
    found = simulate(units, 1)
    assert found.seconds == 8.0
    assert dict(found.transfers) == {"disk 0": 6.0, "disk 1": 1.0}


@pytest.mark.parametrize(("kind", "seconds"), [("solve", 2 + 5 + 2), ("collect", 2 + 5 + 2 + 2)])
def test_what_goes_aside_is_done_by_workers_that_solves_leave_idle(kind: str, seconds: float) -> None:
    """Three units of a second each while one of two workers solves for five; where it gives sums away, afterwards."""
    background = [Unit(f"background {number}", "held-out", 1.0, background=True) for number in range(3)]
    long = Unit("long", kind, 5.0, ("0/0", "0/1"))
    units = [*background, *shards(2), long, *shards(2, layer=1, after=("long",))]
    assert simulate(units, workers=2).seconds == seconds
    died = simulate(units, 2, [Failure(at=3.0, worker=0, away=0.0)])
    assert died.busy["held-out"] == 3.0
    assert died.done_again == 1


def test_what_a_dead_worker_had_summed_is_done_again() -> None:
    """Two of four shards are in the sum of worker 0 when it dies in its third; after `given` nothing would be lost."""
    given = Unit("given", "reduce", 0.0, tuple(f"0/{s}" for s in range(4)), on="link")
    lost = simulate([*shards(4, summed="given"), given], 2, [Failure(at=3.0, worker=0, away=100.0)])
    assert lost.done_again == 2
    assert lost.seconds == 2.0 + 2.0 + 2 * 2.0  # worker 1 does its two, then the other two again
    later = [*shards(4, summed="given"), given, Unit("solve", "solve", 5.0, ("given",))]
    kept = simulate(later, 2, [Failure(at=6.0, worker=1, away=1.0)])
    assert kept.done_again == 0
    alone = simulate(shards(4), 2, [Failure(at=1.0, worker=1, away=100.0)])
    assert (alone.done_again, alone.seconds) == (1, 8.0)


def test_a_dense_job_by_hand() -> None:
    """Of each layer, what the next one does not hide: of giving away (200 / 50), adding (200 * 3 / 2 / 50) and storing
    (0.2) the last one's."""
    passes = PlannedPasses(layers=2, shards=4, workers=2, importance=0, compressed=False)
    assert (collect_seconds(WORK, RATES), add_seconds(WORK, RATES, passes)) == pytest.approx((4.0, 6.0))
    found = simulate(list(job_units(WORK, RATES, passes)), 2)
    # Reads a layer (0.1), statistics at (8 + 4) / 2; gives away, adds and stores the last; then solves 4 + 1 a layer,
    # for each of which it reads 200 bytes of moments at half the disk's rate; writes.
    begun = 2 * 0.1 + START_SECONDS  # digests of the staged layers take nothing
    assert found.seconds == pytest.approx(begun + 0.1 + 2 * 6 + 4 + 6.2 + (4 + 0.2) + (1 + 0.2) + 0.08)
    assert found.busy["solve"] == pytest.approx(2 * (4.0 + 0.2 + 1.0 + 0.2))
    assert [found.transfers[f"link {worker}"] for worker in range(2)] == [2 * 4.0] * 2


def test_a_pass_in_which_layers_are_solved_by_hand() -> None:
    """Of two layers at a time first the long solves, then the short ones: between two layers of the pass."""
    rates = replace(RATES, link=1e9, network=1e9)
    layers, passing, solving = 6, (8 + 4) / 2, 4 + 1
    kept = PlannedPasses(layers, shards=4, workers=2, importance=0, compressed=False, in_pass=True)
    stored, dropped = (list(job_units(WORK, rates, passes)) for passes in (kept, replace(kept, keep_statistics=False)))
    units = [unit.name for unit in dropped if unit.kind == "solve" or unit.name.endswith(" 0 0") or unit.shard == 0]
    found = simulate(dropped, 2)
    begun = layers * 0.1 + START_SECONDS + 0.1
    # The last two are written one after the other.
    assert found.seconds == pytest.approx(begun + layers * (passing + solving / 2) + 2 * 0.08, abs=0.1)
    assert found.busy["solve"] == pytest.approx(layers * solving, abs=0.01)
    assert [name for name in units if name.startswith(("solve", "statistics"))][:9] == [
        "statistics 0 0", "statistics 1 0", "statistics 2 0",
        "solve 0 0", "solve 1 0", "solve 0 1", "solve 1 1",
        "statistics 3 0", "statistics 4 0",
    ]  # fmt: skip
    assert not [unit for unit in dropped if unit.kind == "store"]
    assert simulate(stored, 2).seconds == pytest.approx(found.seconds, abs=0.1)
    assert simulate(stored, 2).transfers["disk 0"] == pytest.approx(layers * (0.1 + 0.2 + 0.08))


def test_sums_are_not_waited_for_while_layers_are_written() -> None:
    """Those of as many layers as there are workers may be on their way to the store, and one more."""
    slow = replace(RATES, disk=10, link=1e9, network=1e9)
    work = replace(WORK, weight_bytes=0, written_bytes=0, solves=())
    ended = {}
    for layers in (4, 5):
        passes = PlannedPasses(layers, shards=8, workers=2, importance=0, compressed=False, in_pass=True)
        found = simulate(list(job_units(work, slow, passes)), 2)
        ended[layers] = found.ended["statistics"]
        assert found.seconds == pytest.approx(START_SECONDS + 6.0 + layers * 20.0, abs=0.1)
    assert ended[4] == pytest.approx(START_SECONDS + 4 * 6.0, abs=0.1)
    assert ended[5] >= START_SECONDS + 6.0 + 20.0 + 6.0


def test_staged_layers_are_held_against_their_digests_beside_the_rest() -> None:
    """Each in one of sixteen threads, 8 s as soon as it is written: the last one's alone are waited for."""
    passes, slow = (
        PlannedPasses(layers=3, shards=4, workers=2, importance=4, compressed=True),
        replace(RATES, digest=16 * 10),
    )
    plain, verified = (simulate(list(job_units(WORK, rates, passes)), 2) for rates in (RATES, slow))
    digests = [sum(job.transfers[f"digest {layer}"] for layer in range(3)) for job in (plain, verified)]
    assert digests == pytest.approx([0.0, 3 * 8.0], abs=1e-5)
    reading = 3 * 100 / 160 - 3 * 100 / 1000  # of the source, before anything starts
    assert verified.seconds == pytest.approx(plain.seconds + reading + 8.0)


def test_a_layer_is_not_begun_before_one_of_those_before_it_is_stored() -> None:
    """Storing takes 20 s, two passes: every layer waits for it; with every three workers one more may be under way."""
    slow = replace(RATES, disk=10, link=1e9, workers_per_node=8)
    work = replace(WORK, weight_bytes=0, written_bytes=0, solves=())
    for workers, ahead in ((1, 1), (2, 1), (4, 2)):
        passes = PlannedPasses(layers=4, shards=8, workers=workers, importance=0, compressed=False)
        passing = 12.0 / workers
        found = simulate(list(job_units(work, slow, passes)), workers)
        ends = [passing + 20.0]
        for layer in range(1, 4):
            begun = max(layer * passing, ends[layer - ahead - 1] if layer > ahead else 0.0)
            ends.append(max(ends[-1], begun + passing) + 20.0)
        assert found.seconds == pytest.approx(START_SECONDS + ends[-1], abs=0.1)


def test_sums_cross_the_link_on_each_node_and_the_network_once() -> None:
    """Four workers on two nodes, 200 bytes: 3/2 of a sum in and out on a node, 3/4 across, half of one comes over."""
    passes = PlannedPasses(layers=2, shards=4, workers=4, importance=0, compressed=False)
    assert add_seconds(WORK, RATES, passes) == pytest.approx(200 * (3 / 2 + 3 / 4) / 50 + 100 / 20)
    on_cpu = replace(RATES, memory=50)
    assert add_seconds(WORK, on_cpu, passes) == pytest.approx(200 * 3 * (1 / 2 + 1 / 4) / 50 + 100 / 20)


def test_a_compressed_job_waits_for_each_layer() -> None:
    passes = PlannedPasses(layers=2, shards=4, workers=2, importance=4, compressed=True)
    found = simulate(list(job_units(WORK, RATES, passes)), 2)
    # Importance, statistics, giving, adding, the longer solve and its moments (100 bytes); but behind the last layer,
    # propagating beside writing.
    layer = 8 / 2 + 8 / 2 + 4 + 6 + (4 + 2) + 6 / 2
    assert found.seconds == pytest.approx(START_SECONDS + 2 * 0.1 + 0.1 + 2 * layer - 6 / 2 + 2 * 0.08, abs=0.2)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_job_ends_whoever_fails_and_when(workers: int, compressed: bool) -> None:
    """At any time, again while it is away, and all at once: not later than by what was lost and waited for."""
    passes = PlannedPasses(
        layers=3, shards=4, workers=workers, importance=4 if compressed else 0, compressed=compressed
    )
    units = list(job_units(WORK, RATES, passes))
    whole = simulate(units, workers).seconds
    for at in range(0, int(whole), 3):
        for failures in (
            [Failure(at, at % workers)],
            [Failure(at, 0, away=9.0), Failure(at + 2, 0, away=9.0), Failure(at + 20, 0)],
            [Failure(at, worker, away=7.0) for worker in range(workers)],
        ):
            found = simulate(units, workers, failures)
            assert found.seconds <= whole + sum(failure.away for failure in failures) + len(failures) * whole
            assert found.seconds >= whole or workers > 1  # another order may suit the last layer better


def test_the_closed_form_of_small_jobs() -> None:
    in_pass = PlannedPasses(9, 4, 2, 0, False, in_pass=True)
    for passes in (
        in_pass,
        replace(in_pass, keep_statistics=False),
        PlannedPasses(9, 4, 2, 0, False),
        PlannedPasses(9, 4, 2, 4, True),
        PlannedPasses(9, 4, 2, 2, True),
    ):
        simulated = simulate(list(job_units(WORK, RATES, passes)), 2).seconds
        assert sum(phase_seconds(WORK, RATES, passes).values()) == pytest.approx(simulated, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("propagate", "workers"), [("dense", 1), ("dense", 8), ("compressed", 1), ("compressed", 8)])
def test_the_plan_agrees_with_the_simulator_at_70b(propagate: str, workers: int) -> None:
    rates, compressed = rates_of("H200"), propagate == "compressed"
    passes = PlannedPasses(geometry("70B").num_layers, 32, workers, 16 * compressed, compressed, held_out_shards=26)
    work = work_of("70B", propagate)
    simulated = simulate(list(job_units(work, rates, passes)), workers).seconds
    phases = phase_seconds(work, rates, passes)
    assert sum(phases.values()) == pytest.approx(simulated, rel=0.25)


@pytest.mark.parametrize(("correct", "workers"), [("none", 1), ("none", 8), ("none", 16), ("output", 8)])
def test_the_plan_agrees_where_ranks_follow_the_loss(correct: str, workers: int) -> None:
    rates = rates_of("H200")
    passes = PlannedPasses(16, 32, workers, 0, False, cached=True, gradient_shards=32, held_out_shards=26)
    work = work_of("70B", "dense", method="loss_aware", correct=correct)
    found, phases = simulate(list(job_units(work, rates, passes)), workers), phase_seconds(work, rates, passes)
    assert sum(phases.values()) == pytest.approx(found.seconds, rel=0.25)
    assert found.busy["curves"] == pytest.approx(16 * sum(solve_seconds(curve, rates) for curve in work.curves))
    scored = sum(held_out_seconds(flops, work, rates, passes) for flops in work.held_out_flops)
    assert found.busy["held-out"] == pytest.approx(16 * scored)
    assert (found.busy["correct"] > 0) == (correct == "output")


@pytest.mark.parametrize("inputs", ["compressed", "dense", "mixed"])
@pytest.mark.parametrize("workers", [1, 8])
def test_the_plan_agrees_where_layers_are_refined(workers: int, inputs: str) -> None:
    rates = rates_of("H200")
    passes = PlannedPasses(16, 32, workers, 0, False, cached=True, gradient_shards=32, held_out_shards=26)
    work = work_of("70B", "dense", method="loss_aware", refine={"inputs": inputs})
    found, phases = simulate(list(job_units(work, rates, passes)), workers), phase_seconds(work, rates, passes)
    assert sum(phases.values()) == pytest.approx(found.seconds, rel=0.25)
    refined = 16 * (work.refinement.training_seconds(rates, passes.cached) + work.refinement.passes / rates.products)
    assert found.busy["refine"] == pytest.approx(refined)


def test_workers_without_a_layer_share_its_long_curve() -> None:
    """Two layers of one curve of 2 + 12 seconds on two workers, and on eight: 2, then four parts of 3."""
    begun = Work(20)
    work = replace(WORK, curves=(Work(140, pieces=6, shared=begun),))
    seconds = {}
    for workers in (2, 8):
        passes = PlannedPasses(layers=2, shards=1, workers=workers, importance=0, compressed=False, cached=True)
        plain = simulate(list(job_units(WORK, RATES, passes)), workers).seconds
        seconds[workers] = simulate(list(job_units(work, RATES, passes)), workers).seconds - plain
    reading = 200 / 50
    assert seconds == pytest.approx({2: reading + 14.0, 8: reading + 2.0 + reading + 3.0})


def test_the_work_of_a_70b_layer() -> None:
    """N² moments of the MLP dominate: 3.3 GB in one triangle, 8.8e14 operations for its products."""
    work = work_of("70B", "dense")
    assert work.weight_bytes == 2 * 855_654_400
    assert work.moment_bytes == pytest.approx(4 * 28672**2, rel=0.01)
    assert work.moment_flops == pytest.approx(2**20 * 28672**2, rel=0.03)
    assert work.forward_flops == pytest.approx(2**20 * 2 * 855_654_400, rel=0.05)
    assert work.packed_flops == pytest.approx(work.forward_flops - 0.2 * 2**20 * 2 * 855_654_400)
    assert work.statistics_flops == pytest.approx(work.forward_flops - 2**20 * 2 * 8192 * 28672)
    assert len(work.solves) == 2


def test_what_workers_pass_on_by_hand() -> None:
    """Two workers a node. Of a dense pass, and of the way back, two layers are on their way to the store, of three
    workers three; nothing grows with the shards."""

    def held(workers: int, compressed: bool, in_pass: bool = False, **changes: Any) -> int:
        passes = PlannedPasses(8, shards=8, workers=workers, importance=0, compressed=compressed, gradient_shards=3)
        passes = replace(passes, in_pass=in_pass)
        return object_store_bytes(replace(WORK, **changes), RATES, passes)

    assert [held(1, True), held(2, True)] == [200, (2 + 1) * 200]
    assert [held(1, False), held(2, False)] == [2 * 200, 2 * (2 + 1) * 200]
    assert held(3, False) == 3 * (2 + 1 + 1) * 200 + 3 * 100
    # Solved in the pass: two layers on their way from the workers, two for each worker, and factors (80) of as many.
    assert held(1, False, in_pass=True) == (2 + 2) * 200 + 4 * 80
    assert held(3, False, in_pass=True) == 2 * (2 + 1 + 1) * 200 + 3 * 200 + 3 * 100 + 4 * 80
    assert held(1, False, sample_bytes=70) == 2 * 200 + 70
    assert held(2, False, gradient_bytes=900) == 2 * (2 + 1) * 900
    assert held(4, False, gradient_bytes=1100) == 3 * (2 + 1 + 1) * 1100
    assert held(2, False, pair_bytes=(30, 900)) == 3 * 900
    assert held(2, False, written_bytes=800) == 6 * 800
    assert held(2, True, written_bytes=800) == 800
    work = work_of("70B", "dense", method="loss_aware", correct="output")
    assert max(work.pair_bytes) == 8 * 8192 * 28672 + 4 * 28672 * 28673
    assert sum(work.pair_bytes) - max(work.pair_bytes) == 3 * (8 * 8192 * 8192 + 4 * 8192 * 8193)
    assert work.sample_bytes == 28672 * 8 * 8192 * 4


def test_pairs_leave_each_worker_once() -> None:
    """Of a layer, 100 bytes of all pairs, at 50 a second: out, three halves in and out again to be added, and in."""
    passes = PlannedPasses(layers=3, shards=4, workers=2, importance=0, compressed=False, cached=True)
    work = replace(WORK, correction_flops=500.0, grid_flops=0.0)
    pairs = replace(work, pair_bytes=(30, 70), pair_added_bytes=200.0)
    between = pair_seconds(pairs, RATES, passes)
    assert between == pytest.approx(2.0 + add_seconds(replace(work, moment_bytes=100), RATES, passes) + 2.0)
    adding = 200 / RATES.memory / 2
    clock = [simulate(list(job_units(each, RATES, passes)), 2).seconds for each in (work, pairs)]
    assert clock[1] - clock[0] == pytest.approx(3 * (adding + between))
    plan = [phase_seconds(each, RATES, passes)["correct"] for each in (work, pairs)]
    assert plan[1] - plan[0] == pytest.approx(3 * (adding + between))


def test_a_sample_has_no_more_tokens_than_there_are() -> None:
    """Of a small job's few tokens, not of the 65,536 that a sample has where there are as many."""
    entry = {"method": "loss_aware"}
    found = {}
    for samples in (4, 256):
        given = {
            "text": {"files": ["t"]},
            "samples": samples,
            "sequence_length": 256,
            "shards": 4,
            "propagate": "dense",
        }
        job, small = manifest(keep=0.8, calibration=given, methods=[entry]), llama("gqa")
        work = layer_work(job, small, claim_tasks(build_methods(job), small), 2)
        found[samples] = sum(solve.sampled for solve in work.solves)
    assert found[256] == pytest.approx(64 * found[4])
    assert found[4] > 0


def test_gpus_by_name() -> None:
    assert rates_of("h200") == rates_of("NVIDIA H200")
    assert replace(rates_of("H100"), memory=0, device_bytes=0) == replace(rates_of("H200"), memory=0, device_bytes=0)
    with pytest.raises(ValueError, match=r"'RTX' does not name exactly one of the GPUs with known rates: NVIDIA H200"):
        rates_of("RTX")
