"""The simulator on jobs small enough to add up by hand, and the plan's closed form against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.phases import object_store_bytes, pair_seconds, phase_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import START_SECONDS, Prices
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.cost_model.work import LayerWork, layer_work
from pipeline.driver.job_spec import Job
from pipeline.methods.method import Moment
from pipeline.methods.work import Work
from pipeline.units.sums import Collect
from pipeline.units.units import Forward, Unit
from tests.driver.simulation import (
    IMPORTANCE,
    make_corrected_job,
    make_experts_job,
    make_gradient_job,
    make_job,
    make_tasks,
)
from tests.families.geometries import llama, manifest
from tools.simulate import geometry, manifest_of, prices_for
from tools.simulate import job_of as spec_of
from tools.simulator.clock import Clock, Course, Transfer
from tools.simulator.pool import ClockPool, Failure, Worker
from tools.simulator.simulator import Simulated, simulate

RATES = Rates(
    products=100, backward=100, moments=100, single=50, double=10, factors=10, eigen=10, memory=1e9, link=50,
    network=20, disk=1000, digest=1e9, step_s=0.5, column_s=0.1, commit_s=0.0, workers_per_node=2,
)  # fmt: skip
WORK = LayerWork(
    weight_bytes=100, decoded_bytes=100, largest_bytes=60, written_bytes=80, hidden_bytes=0, forward_flops=800,
    statistics_flops=400,
    packed_flops=600, moment_flops=400, added_bytes=0, cosine_bytes=0, moment_bytes=200, gradient_flops=0,
    solves=(Work(30, steps=2), Work(10)),
)  # fmt: skip


Settings = dict[str, Any]


def job_of(passes: PlannedPasses, **settings: Any) -> Job:
    """Return a job with these passes, of two groups a layer. It commits no hidden states."""
    scored = bool(passes.importance) or not (passes.compressed or passes.in_pass)
    given: Settings = {
        "propagate": "compressed" if passes.compressed else "dense",
        "scores": IMPORTANCE if scored else frozenset(),
        "importance_shards": tuple(range(passes.importance or passes.shards)),
        "keep_statistics": passes.keep_statistics and not passes.compressed,
        "every": passes.layers,
    }
    return make_job(make_tasks(range(passes.layers)), passes.layers, passes.shards, **{**given, **settings})


def loss_job(passes: PlannedPasses, work: LayerWork) -> Job:
    """Return a job whose ranks follow curves, as many as the work has."""
    pieces, shards = max(curve.pieces for curve in work.curves), tuple(range(passes.gradient_shards))
    job = make_gradient_job(range(passes.layers), shards=passes.shards, gradient_shards=shards, every=passes.layers)
    tasks = tuple(replace(task, pieces=pieces) for task in job.tasks)
    predicts = tuple(task for task in tasks if task.name == "loss-mlp") if len(work.curves) == 1 else tasks
    return replace(job, tasks=tasks, predicts=predicts)


def simulated(
    passes: PlannedPasses, work: LayerWork = WORK, rates: Rates = RATES, failures: Sequence[Failure] = ()
) -> Simulated:
    return simulate(job_of(passes), Prices(work, rates, passes), failures)


def run_out(clock: Clock) -> None:
    """Advance a clock past its last event."""

    def go() -> None:
        while True:
            clock.step()

    with pytest.raises(RuntimeError, match="every course waits for another"):
        go()


def test_transfers_of_a_place_come_one_after_another_beside_the_computing() -> None:
    clock, ended = Clock(), dict[str, float]()

    def reading(name: str, place: str, seconds: float, pieces: int = 1) -> Course[str]:
        yield clock.transfer(place, seconds, pieces)
        return name

    def computing(reads: Transfer) -> Course[str]:
        yield reads
        yield 5.0
        return "computing"

    def end(name: str) -> None:
        ended[name] = clock.now

    shared = clock.transfer("disk 0", 3.0)
    for course in (
        reading("second", "disk 0", 3.0, 3),
        reading("third", "disk 0", 1.0),
        reading("other", "disk 1", 1.0),
    ):
        clock.run(course, end)
    clock.run(computing(shared), end)
    clock.run(computing(shared), lambda _: pytest.fail("it is dead"), alive=lambda: clock.now < 4.0)
    run_out(clock)
    assert ended == {"other": 1.0, "third": 5.0, "second": 7.0, "computing": 8.0}
    assert clock.busy == {"disk 0": 7.0, "disk 1": 1.0}


def pool_of(workers: int, seconds: Callable[[Unit], float], failures: Sequence[Failure] = ()) -> ClockPool:
    def course(unit: Unit, worker: Worker) -> Course[str]:
        yield seconds(unit)
        return worker.name

    return ClockPool(Clock(), course, workers, workers_per_node=2, failures=failures)


def done(pool: ClockPool, units: Sequence[Unit]) -> list[tuple[str, str, float]]:
    """Return the key, the result and the end of each unit."""
    for unit in units:
        pool.submit(unit)
    return [(unit.key, result, pool.clock.now) for unit, result in (pool.wait() for _ in units)]


def test_units_are_spread_and_a_worker_goes_on_with_its_shards() -> None:
    """Shard 0 of layer 1 takes long. No worker takes over shard 1 from a worker that holds only that."""
    pool = pool_of(2, lambda unit: 9.0 if unit.key == "forward/dense/1/0/dense" else 2.0)
    assert [end for _, _, end in done(pool, [Forward("dense", 0, shard) for shard in range(5)])] == [2, 2, 4, 4, 6]
    pool = pool_of(2, lambda unit: 9.0 if unit.key == "forward/dense/1/0/dense" else 2.0)
    first = {key: worker for key, worker, _ in done(pool, [Forward("dense", 0, shard) for shard in range(2)])}
    then = {key: (worker, end) for key, worker, end in done(pool, [Forward("dense", 1, shard) for shard in range(2)])}
    assert then["forward/dense/1/0/dense"] == (first["forward/dense/0/0/dense"], 11.0)
    assert then["forward/dense/1/1/dense"] == (first["forward/dense/0/1/dense"], 4.0)
    assert pool.nodes == [["worker-0", "worker-1"]]


def test_units_of_a_dead_worker_are_done_again_and_its_sums_are_gone() -> None:
    """It dies in its second unit, with a third that waits; the other worker does both, until it is replaced."""
    moments = (Moment("q.in"),)
    pool = pool_of(2, lambda _: 2.0, [Failure(at=3.0, worker=0, away=100.0), Failure(at=4.0, worker=0)])
    for shard in range(6):
        pool.submit(Forward("dense", 0, shard, moments=moments))
    results = [pool.wait() for _ in range(6)]
    assert [worker for _, worker in results].count("worker-0") == 1
    assert pool.clock.now == 10.0
    assert pool.done_again == 1
    assert pool.size == 1
    assert done(pool, [Collect("dense", 0, "worker-0", "sums", moments)]) == [("collect/dense/0/worker-0", None, 10.0)]
    run_out(pool.clock)
    assert (pool.size, pool.clock.now, pool.members[0].name) == (2, 103.0, "worker-0'")
    pool.submit(Forward("dense", 1, 0))
    pool.cancel_pending()
    assert not pool.finished


def test_a_dense_job_by_hand() -> None:
    """Of each layer, what the next one does not hide: of giving away (200 / 50), adding (200 * 3 / 2 / 50) and storing
    (0.2) the last one's. They are added by the thread that still stores those before."""
    passes = PlannedPasses(layers=2, shards=4, workers=2)
    prices = Prices(WORK, RATES, passes)
    assert (prices.collect_seconds(200), prices.add_seconds(200)) == pytest.approx((4.0, 6.0))
    found = simulated(passes)
    # Reads a layer (0.1), statistics at (8 + 4) / 2; gives away, adds and stores the last; then solves 4 + 1 a layer,
    # for each of which it reads 200 bytes of moments at half the disk's rate; writes.
    assert found.start == pytest.approx(2 * 0.1 + START_SECONDS)  # digests of the staged layers take nothing
    assert found.seconds - found.start == pytest.approx(0.1 + 2 * 6 + 4 + 6.4 + (4 + 0.2) + (1 + 0.2) + 0.08)
    assert found.busy["solve"] == pytest.approx(2 * (4.0 + 0.2 + 1.0 + 0.2))
    assert [found.transfers[f"link worker-{worker}"] for worker in range(2)] == pytest.approx([2 * 4.0] * 2)
    assert found.phases["statistics"] == pytest.approx(0.1 + 2 * 6 + 4 + 6.4)


def test_a_pass_in_which_layers_are_solved_by_hand() -> None:
    """Of two layers at a time first the long solves, then the short ones: between two layers of the pass."""
    rates = replace(RATES, link=1e9, network=1e9)
    layers, passing, solving = 6, (8 + 4) / 2, 4 + 1
    kept = PlannedPasses(layers, shards=4, workers=2, in_pass=True)
    stored, dropped = (simulated(passes, rates=rates) for passes in (kept, replace(kept, keep_statistics=False)))
    # The last two are written one after the other.
    seconds = 0.1 + layers * (passing + solving / 2) + 2 * 0.08
    assert dropped.seconds - dropped.start == pytest.approx(seconds, abs=0.1)
    assert dropped.busy["solve"] == pytest.approx(layers * solving, abs=0.01)
    assert stored.seconds == pytest.approx(dropped.seconds, abs=0.1)
    assert dropped.transfers["disk 0"] == pytest.approx(layers * (0.1 + 0.08))
    assert stored.transfers["disk 0"] == pytest.approx(layers * (0.1 + 0.2 + 0.08))


@pytest.mark.parametrize("propagate", ["dense", "compressed"])
def test_slices_of_experts_take_as_long_as_the_whole_layer(propagate: str) -> None:
    """Two of three layers have three parts, for which workers read the layer once."""
    passes = PlannedPasses(3, 4, 2, 4 * (propagate == "compressed"), propagate == "compressed", held_out_shards=4)
    work = replace(WORK, held_out_flops=(100.0, 80.0))
    found = simulate(make_experts_job(propagate=propagate, shards=4, every=3), Prices(work, RATES, passes))
    whole = simulated(passes, work)
    assert found.busy["statistics"] == pytest.approx(whole.busy["statistics"])
    assert found.busy["held-out"] == pytest.approx(whole.busy["held-out"]) == pytest.approx(3 * (1.0 + 0.8) * 2)
    assert found.done_again == 0


def test_staged_layers_are_held_against_their_digests_beside_the_rest() -> None:
    """Each in one of sixteen threads, 8 s as soon as it is written: the last one's alone are waited for."""
    passes = PlannedPasses(layers=3, shards=4, workers=2, importance=4, compressed=True)
    plain, verified = (simulated(passes, rates=rates) for rates in (RATES, replace(RATES, digest=16 * 10)))
    digests = [sum(job.transfers[f"digest {layer}"] for layer in range(3)) for job in (plain, verified)]
    assert digests == pytest.approx([0.0, 3 * 8.0], abs=1e-5)
    assert verified.seconds - verified.start == pytest.approx(plain.seconds - plain.start + 8.0)


def test_a_layer_is_not_begun_before_one_of_those_before_it_is_stored() -> None:
    """Storing takes 20 s, two passes: every layer waits for it; with every three workers one more may be under way."""
    slow = replace(RATES, disk=10, link=1e9, memory=1e12, workers_per_node=8)
    work = replace(WORK, weight_bytes=0, written_bytes=0, solves=(Work(0),) * 2)
    for workers, ahead in ((1, 1), (2, 1), (4, 2)):
        passes = PlannedPasses(4, 8, workers, cached=True)
        found, passing = simulated(passes, work, slow), 12.0 / workers
        ends = [passing + 20.0]
        for layer in range(1, 4):
            begun = max(layer * passing, ends[layer - ahead - 1] if layer > ahead else 0.0)
            ends.append(max(ends[-1], begun + passing) + 20.0)
        assert found.phases["statistics"] == pytest.approx(ends[-1], abs=0.1)


def test_sums_cross_the_link_on_each_node_and_the_network_once() -> None:
    """Four workers on two nodes, 200 bytes: 3/2 of a sum in and out on a node, 3/4 across, half of one comes over."""
    passes = PlannedPasses(layers=2, shards=4, workers=4)
    assert Prices(WORK, RATES, passes).add_seconds(200) == pytest.approx(200 * (3 / 2 + 3 / 4) / 50 + 100 / 20)
    on_cpu = replace(RATES, memory=50)
    assert Prices(WORK, on_cpu, passes).add_seconds(200) == pytest.approx(200 * 3 * (1 / 2 + 1 / 4) / 50 + 100 / 20)


def test_a_compressed_job_waits_for_each_layer() -> None:
    passes = PlannedPasses(layers=2, shards=4, workers=2, importance=4, compressed=True)
    found = simulated(passes)
    # Importance, statistics, giving, adding, the longer solve and its moments (100 bytes); but behind the last layer,
    # propagating beside writing.
    layer = 8 / 2 + 8 / 2 + 4 + 6 + (4 + 2) + 6 / 2
    assert found.seconds == pytest.approx(START_SECONDS + 2 * 0.1 + 0.1 + 2 * layer - 6 / 2 + 2 * 0.08, abs=0.2)


def test_commits_are_counted_where_a_unit_stores_hidden_states() -> None:
    """A worker has two of four shards: two seconds behind the first layer, whatever the plan spreads over all."""
    passes = PlannedPasses(layers=2, shards=4, workers=2, importance=4, compressed=True)
    prices = Prices(replace(WORK, hidden_bytes=4), replace(RATES, commit_s=1.0), passes)
    never, each = (simulate(job_of(passes, every=every), prices) for every in (2, 1))
    spread = simulate(job_of(passes, every=1), replace(prices, passes=replace(passes, every=1)))
    assert spread.seconds == each.seconds
    assert each.seconds - never.seconds == pytest.approx(2 * 2.0, abs=0.01)  # importance, and the walk


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_job_ends_whoever_fails_and_when(workers: int, compressed: bool) -> None:
    """At any time, again while it is away, and all at once: not later than by what was lost and waited for."""
    passes = PlannedPasses(
        layers=3, shards=4, workers=workers, importance=4 if compressed else 0, compressed=compressed
    )
    whole = simulated(passes)
    for at in range(int(whole.start) + 1, int(whole.seconds), 5):
        for failures in (
            [Failure(at, at % workers)],
            [Failure(at, 0, away=9.0), Failure(at + 2, 0, away=9.0), Failure(at + 20, 0)],
            [Failure(at, worker, away=7.0) for worker in range(workers)],
        ):
            found = simulated(passes, failures=failures)
            most = (1 + len(failures)) * whole.seconds + sum(failure.away for failure in failures)
            assert found.seconds <= most
            assert found.seconds >= whole.seconds or workers > 1  # another order may suit the last layer better


def test_the_closed_form_of_small_jobs() -> None:
    in_pass = PlannedPasses(9, 4, 2, in_pass=True)
    for passes in (
        in_pass,
        replace(in_pass, keep_statistics=False),
        PlannedPasses(9, 4, 2),
        PlannedPasses(9, 4, 2, 4, True),
        PlannedPasses(9, 4, 2, 2, True),
    ):
        found = simulated(passes)
        assert sum(phase_seconds(Prices(WORK, RATES, passes)).values()) == pytest.approx(found.seconds, rel=0.06)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("hidden_bytes", "link", "within"), [(400, 50, 0.06), (40_000, 5000, 0.12)])
def test_the_closed_form_waits_where_hidden_states_are_committed(
    hidden_bytes: int, link: float, within: float, every: int
) -> None:
    """A node's workers share its disk, for 0.4 s or for 40 s, before which the first shards' computing is not counted;
    a dense pass then waits until its sums are stored."""
    work, rates = replace(WORK, hidden_bytes=hidden_bytes), replace(RATES, commit_s=0.5, link=link)
    for passes, most in (
        (PlannedPasses(9, 4, 2, in_pass=True, every=every), 0.83),
        (PlannedPasses(9, 4, 1, every=every), 0.91),
        (PlannedPasses(9, 4, 2, every=every), 0.76),
        (PlannedPasses(9, 4, 2, 4, True, every=every), 0.98),
        (PlannedPasses(9, 4, 2, 2, True, every=every), 0.98),
    ):
        prices = Prices(work, rates, passes)
        found = simulate(job_of(passes, every=every), prices)
        assert sum(phase_seconds(prices).values()) == pytest.approx(found.seconds, rel=within)
        without = replace(prices, passes=replace(passes, every=0))
        assert sum(phase_seconds(without).values()) < most * found.seconds


def predicted(workers: int, propagate: str = "dense", layers: int = 8, **entry: Any) -> tuple[Simulated, Prices]:
    """Return the simulated job of a 70B model of fewer layers on H200, and its prices."""
    shape = geometry("70B")
    shape = replace(shape, layers=shape.layers[:layers])
    job = manifest_of(propagate, None, **entry)
    prices = prices_for(job, shape, rates_of("H200"))
    few = {"shards": 32, "importance": 16 * (propagate == "compressed"), "gradient_shards": 32, "held_out_shards": 26}
    prices = replace(prices, passes=replace(prices.passes, workers=workers, cached=bool(entry), **few))
    spec = replace(spec_of(job, shape, layers), shards=32, importance_shards=tuple(range(16)))
    spec = replace(spec, gradient_shards=tuple(range(32)) if spec.gradient_shards else ())
    return simulate(spec, prices), prices


REFINED = [{"method": "loss_aware", "refine": {"inputs": inputs}} for inputs in ("compressed", "dense", "mixed")]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("job", [{}, {"propagate": "compressed"}, *REFINED])
def test_the_plan_agrees_with_the_simulator_at_70b(job: Settings, workers: int) -> None:
    found, prices = predicted(workers, **job)
    assert sum(phase_seconds(prices).values()) == pytest.approx(found.seconds, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("correct", "workers"), [("none", 1), ("none", 8), ("none", 16), ("output", 8)])
def test_the_plan_agrees_where_ranks_follow_the_loss(correct: str, workers: int) -> None:
    found, prices = predicted(workers, method="loss_aware", correct=correct)
    assert sum(phase_seconds(prices).values()) == pytest.approx(found.seconds, rel=0.25)
    curves = 8 * sum(solve_seconds(curve, prices.rates) for curve in prices.work.curves)
    if workers <= 8:
        assert found.busy["curves"] == pytest.approx(curves)
    else:  # two workers share a layer's curve, and some of its work is done by both
        assert curves < found.busy["curves"] < 1.2 * curves
    scored = sum(map(prices.held_out_seconds, prices.work.held_out_flops))
    assert found.busy["held-out"] == pytest.approx(8 * scored)
    assert (found.busy["correct"] > 0) == (correct == "output")


def test_workers_without_a_layer_share_its_long_curve() -> None:
    """Two layers of one curve of 2 + 12 seconds on two workers, and on eight: 2, then four parts of 3."""
    begun = Work(20)
    work = replace(WORK, curves=(Work(140, pieces=8, shared=begun),))
    seconds = {}
    for workers in (2, 8):
        passes = PlannedPasses(layers=2, shards=1, workers=workers, cached=True)
        seconds[workers] = simulate(loss_job(passes, work), Prices(work, RATES, passes)).phases["curves"]
    reading = 200 / 50
    assert seconds == pytest.approx({2: reading + 14.0, 8: reading + 2.0 + reading + 3.0})


def test_the_work_of_a_70b_layer() -> None:
    """N² moments of the MLP dominate: 3.3 GB in one triangle, 8.8e14 operations for its products."""
    work = prices_for(manifest_of("dense"), geometry("70B"), RATES).work
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
        passes = PlannedPasses(8, shards=8, workers=workers, compressed=compressed, gradient_shards=3)
        passes = replace(passes, in_pass=in_pass)
        return object_store_bytes(Prices(replace(WORK, **changes), RATES, passes))

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
    corrected = manifest_of("dense", method="loss_aware", correct="output")
    work = prices_for(corrected, geometry("70B"), RATES).work
    assert max(work.pair_bytes) == 8 * 8192 * 28672 + 4 * 28672 * 28673
    assert sum(work.pair_bytes) - max(work.pair_bytes) == 3 * (8 * 8192 * 8192 + 4 * 8192 * 8193)
    assert work.sample_bytes == 28672 * 8 * 8192 * 4


def test_a_pass_waits_for_samples_and_for_the_inputs_of_gradient_samples() -> None:
    """Of each of three layers 2 s to write all samples, and 0.5 to write a worker's half of the inputs."""
    passes = PlannedPasses(layers=3, shards=4, workers=2, gradient_shards=4)
    rates = replace(RATES, link=1e9, network=1e9)
    more = replace(WORK, sample_bytes=2000, gradient_input_bytes=1000)
    plan = [
        phase_seconds(Prices(replace(work, gradient_flops=1.0), rates, passes))["statistics"] for work in (WORK, more)
    ]
    assert plan[1] - plan[0] == pytest.approx(3 * (2.0 + 0.5))
    job = job_of(passes)
    sampled = tuple(replace(task, moments=(*task.moments, Moment("mlp.in", kind="sample"))) for task in job.tasks)
    clock = [
        simulate(replace(job, tasks=tasks), Prices(work, rates, passes)).phases["statistics"]
        for tasks, work in ((job.tasks, WORK), (sampled, replace(WORK, sample_bytes=2000)))
    ]
    assert clock[1] - clock[0] == pytest.approx(3 * 2.0, abs=0.7)  # the disk stores moments, too


def test_pairs_leave_each_worker_once() -> None:
    """Of a layer, 100 bytes of all pairs, at 50 a second: out, three halves in and out again to be added, and in."""
    passes = PlannedPasses(layers=3, shards=4, workers=2, cached=True)
    work = replace(WORK, correction_flops=500.0, grid_flops=0.0)
    pairs = replace(work, pair_bytes=(30, 70), pair_added_bytes=200.0)
    prices = Prices(pairs, RATES, passes)
    between = pair_seconds(prices)
    assert between == pytest.approx(2.0 + prices.add_seconds(100) + 2.0)
    plan = [phase_seconds(each)["correct"] for each in (replace(prices, work=work), prices)]
    assert plan[1] - plan[0] == pytest.approx(3 * (200 / RATES.memory / 2 + between))
    job = make_corrected_job(range(3), ["second"], shards=4, every=3)
    clock = [
        simulate(job, Prices(replace(each, pair_bytes=size), RATES, passes))
        for each, size in ((work, (0, 0)), (pairs, (30, 70)))
    ]
    assert clock[1].phases["correct"] - clock[0].phases["correct"] == pytest.approx(
        3 * (200 / RATES.memory / 2 + between)
    )


def test_a_sample_has_no_more_tokens_than_there_are() -> None:
    """Of a small job's few tokens, not of the 65,536 that a sample has where there are as many."""

    def sampled(samples: int) -> float:
        cut = {"text": {"files": ["t"]}, "samples": samples, "sequence_length": 256, "shards": 4, "propagate": "dense"}
        job = manifest({"method": "loss_aware"}, keep=0.8, calibration=cut)
        return sum(solve.sampled for solve in layer_work(PlannedJob.of(job, llama())).solves)

    assert sampled(256) == pytest.approx(64 * sampled(4))
    assert sampled(4) > 0


def test_gpus_by_name() -> None:
    assert rates_of("h200") == rates_of("NVIDIA H200")
    assert replace(rates_of("H100"), memory=0, device_bytes=0) == replace(rates_of("H200"), memory=0, device_bytes=0)
    with pytest.raises(ValueError, match=r"'RTX' does not name exactly one of the GPUs with known rates: NVIDIA H200"):
        rates_of("RTX")
