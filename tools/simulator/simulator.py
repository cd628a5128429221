"""Simulate a job: its real driver on a pool of simulated workers, whose units take the seconds of the cost model.

See docs/plan.md. Nothing is computed: a job of hours takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifests.entries import GroupReport, LayerEntry
from manifests.records import ArrayRecord, E, LedgerKey, StagedLayer
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.prices import START_SECONDS, Prices
from pipeline.cost_model.rates import DIGEST_THREADS
from pipeline.driver.comparing import compare_layers
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import Job, LayersEntered
from pipeline.driver.scheduler import Coroutine, Fiber, Scheduler
from pipeline.driver.scoring import Outputs, Scorer, score_beside_dense
from pipeline.job.store_cleaner import KeepingCleaner
from pipeline.methods.registry import layers_of
from pipeline.units.scores import Scored, Windows
from pipeline.units.units import Unit
from tools.simulator.clock import Clock, Transfer
from tools.simulator.estimates import RECORD, Estimates
from tools.simulator.memory_journal import MemoryJournal
from tools.simulator.pool import ClockPool, Failure


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        start: the seconds before the first unit.
        phases: the seconds of each phase of the driver.
        busy: the workers' seconds by kind of work; `transfers`: the seconds of places, such as disks.
        done_again: the number of units that were done again.
    """

    seconds: float
    start: float
    workers: int
    phases: Mapping[str, float]
    busy: Mapping[str, float]
    transfers: Mapping[str, float]
    done_again: int = 0

    @property
    def idle_share(self) -> float:
        """The share of the workers' time after the start that they are idle."""
        return 1.0 - sum(self.busy.values()) / (self.workers * (self.seconds - self.start))


def simulate(job: Job, prices: Prices, failures: Sequence[Failure] = ()) -> Simulated:
    """Simulate a job, from the digests of its source to the check of its last staged layer."""
    work, passes = prices.work, prices.passes
    start = prices.digest_seconds() + START_SECONDS
    clock = Clock(start)
    once = replace(prices, passes=replace(passes, every=0))  # units that store hidden states commit them
    estimates = Estimates(clock, job, once)
    pool = ClockPool(clock, estimates, passes.workers, prices.rates.workers_per_node, failures)
    observer, journal = _Phases(clock), _CheckedJournal(clock, prices.verify_seconds())
    scheduler = Scheduler(pool, observer)
    layers = LayersEntered(journal, job.num_layers, layers_of(job.tasks))
    if work.compare_flops:
        scheduler.spawn_background(compare_layers(layers, ((0,),)))
    if any(work.held_out_flops):
        scheduler.spawn_background(_scoring(job, passes, scheduler, journal, layers))
    Driver(job, scheduler, journal, KeepingCleaner()).run()
    scheduler.run_background()
    observer.phase("verify", 0, 0)
    while not all(check.done for check in journal.checks):
        clock.step()
    observer.phase("", 0, 0)
    return Simulated(
        clock.now, start, passes.workers, observer.seconds, estimates.busy, clock.busy, done_again=pool.done_again
    )


def _scoring(
    job: Job, passes: PlannedPasses, scheduler: Scheduler, journal: MemoryJournal, layers: LayersEntered
) -> Coroutine[Scored]:
    """Score held-out text by the dense and the compressed model, or by the latter alone if the texts came first."""
    windows = Windows.even(passes.held_out_shards, passes.held_out_shards, "float32", 1, models=2)

    def scorer() -> Scorer:
        return Scorer(
            scheduler,
            journal,
            KeepingCleaner(),
            job.num_layers,
            job.every,
            alone=lambda: scheduler.alone,
            parts=parts,
        )

    def parts(layer: int, staged: StagedLayer | None) -> Sequence[int | None]:
        return [part.number for part in job.parts(layer, (), staged)]

    def dense_outputs() -> Coroutine[tuple[ArrayRecord, ...]]:
        states = yield from scorer().states_coroutine(windows, "held-out-dense", [None] * job.num_layers)
        return states.outputs

    dense: Outputs | Fiber[tuple[ArrayRecord, ...]] = (RECORD,) * windows.shards
    if not passes.joined:
        dense = scheduler.spawn_background(dense_outputs())
    return (yield from score_beside_dense(scorer(), windows, "held-out", layers, dense))


class _Phases:
    """An observer that adds up the simulated seconds of each phase."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.name, self.begun = "", clock.now

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        if self.name:
            self.seconds[self.name] += self.clock.now - self.begun
        self.name, self.begun = name, self.clock.now

    def unit_done(self, unit: Unit, result: Any) -> None: ...

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, GroupReport]) -> None: ...

    def repaired(self, reason: str, keys: Sequence[str]) -> None: ...


class _CheckedJournal(MemoryJournal):
    """Holds staged layers against their digests as soon as they are entered, each in a thread of the driver."""

    def __init__(self, clock: Clock, verify_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.verify_s = verify_s
        self.checks: list[Transfer] = []

    def commit(self, key: LedgerKey[E], record: E) -> None:
        super().commit(key, record)
        if isinstance(record, LayerEntry):
            self.checks.append(self.clock.transfer(f"digest {len(self.checks) % DIGEST_THREADS}", self.verify_s))
