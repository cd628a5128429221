"""The stages that compute: the layers are compressed by the workers, and put together as OUTPUT."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from manifests.entries import ComparedEntry, TokensEntry
from manifests.errors import CorruptError
from manifests.importing import quick_imports
from manifests.records import ArrayRecord, ComparedFigures, Origin, StagedRecord
from pipeline.checkpoint.assembling import Assembler
from pipeline.checkpoint.decoding_cost import count_dense
from pipeline.checkpoint.layer_checks import LayerChecks
from pipeline.checkpoint.output_directory import claim_files, survey_output
from pipeline.console.signals import catch_signals, interrupt_on_signals, interrupting
from pipeline.cost_model.rates import known_rates
from pipeline.driver.background_pool import BackgroundPool
from pipeline.driver.driver import Driver
from pipeline.driver.interfaces import Journal
from pipeline.driver.job_spec import Job, LayersEntered
from pipeline.driver.ledger_keys import COMPARED, HARDWARE, HELD_OUT, SCORED, TOKENS
from pipeline.driver.pool_proxy import BusyPool
from pipeline.driver.recovery import REPAIRS
from pipeline.driver.scheduler import NOTHING_DUE, TaskStream
from pipeline.driver.scoring import Scorer
from pipeline.evaluation.perplexity import sweep_scratch
from pipeline.inputs.calibration import sample_tokens
from pipeline.job.commits import commit_interval
from pipeline.job.context import JobContext, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.remaining_phases import job_outlook
from pipeline.methods.registry import layers_of
from pipeline.reporting.unit_log import units_logged
from pipeline.units.scores import COMPARED_LAYERS, Compare
from stores.activations import ActivationStore
from stores.background import Background
from stores.ledger import Ledger
from stores.run_directory import RunDirectory
from stores.statistics import StatisticsStore
from stores.storage import open_storage
from workers.config import WorkerConfig
from workers.pools import worker_pool

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
LAYER = re.compile(r"(^|/)layer/\d+$")  # of the job, or of a point of a sweep


class Scoring(Protocol[T_co]):
    """What is made of layers while others are being compressed; it is not waited for that they are."""

    def __call__(self, job: JobContext, background: BackgroundPool, layers: LayersEntered) -> TaskStream[T_co]: ...


@dataclass(frozen=True)
class Effort:
    """What the workers took: kind of unit -> [units, seconds, of these inside products], worker -> peak bytes."""

    units: dict[str, list[float]]
    peak_bytes: dict[str, int]


class StoreCleaner:
    """See `pipeline.driver.interfaces.Cleaner`; the arrays of `always` stay.

    Where nothing is to be retained, and at first, everything that nobody names is looked for, such as what a dead
    worker had written, unless others may be writing there; otherwise what was retained before is dropped, for which
    nobody waits.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        always: list[ArrayRecord],
        dropping: Background,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """`dropping`: in it arrays are dropped. `alone`: whether nobody else writes hidden states."""
        self.run_dir = run_dir
        self.dropping = dropping
        self.alone = alone
        self.activations: ActivationStore = run_dir.activations
        self.statistics: StatisticsStore = run_dir.statistics
        self.always = always
        self._retained: dict[Any, dict[str, ArrayRecord]] = {}  # store -> path -> record

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops all stored hidden states but these."""
        self._retain(self.activations, records, self.always)

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops all stored moments but these."""
        self._retain(self.statistics, records, [])

    def _retain(
        self, store: ActivationStore | StatisticsStore, records: tuple[ArrayRecord, ...], always: list[ArrayRecord]
    ) -> None:
        live = {record.path: record for record in (*records, *always)}
        before = self._retained.get(store)
        if (before is None or not records) and (store is self.statistics or self.alone()):
            self.dropping.finish()
            store.sweep(live.values())
        elif dropped := [record for path, record in (before or {}).items() if path not in live]:
            self.dropping.submit(store.drop, *dropped)
        self._retained[store] = live

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drops all staged layers but these."""
        self.run_dir.sweep_staged(records)


class JobWorkers:
    """The workers of a job: they compress its layers, at one size or at several, and score what came of it.

    Attributes:
        always: stored tokens and hidden states that outlive whatever is computed.
        every: hidden states are committed each time this many layers are done.
        dropping: what drops replaced ones meanwhile.
    """

    def __init__(self, pool: BusyPool, always: list[ArrayRecord], every: int, dropping: Background) -> None:
        self.pool = pool
        self.always = always
        self.every = every
        self.dropping = dropping

    @property
    def effort(self) -> Effort:
        """What they took so far."""
        return Effort(self.pool.seconds, dict(self.pool.peak_bytes))

    def scorer(self, job: JobContext) -> Scorer:
        """Scores models by them."""
        cleaner = StoreCleaner(job.run_dir, self.always, self.dropping)
        return Scorer(self.pool, job.ledger, cleaner, job.observer, job.inputs.geometry.num_layers, self.every)

    def take_curves(self, job: JobContext) -> None:
        """Everything that ranks follow, entered in the ledger."""
        self.driver(job).prepare()

    def compress(self, job: JobContext, *, compared: bool = True, scoring: Scoring[T] | None = None) -> T | None:
        """Every claimed layer, staged and entered in the ledger; a staged layer that is damaged is made again.

        `compared`: what they do beside the dense ones is entered, too, as OUTPUT's record wants it, by one worker;
        `scoring`: what else is made of the layers while others are compressed. What comes of it is returned; None where
        something it needed was damaged or lost.
        """
        claimed = layers_of(job.inputs.tasks)
        for attempt in range(REPAIRS + 1):
            self.pool.forget()  # what is behind layers that are made anew
            layers = LayersEntered(job.ledger, job.inputs.geometry.num_layers, claimed)
            background = BackgroundPool(self.pool)
            with LayerChecks(job.ledger, job.run_dir.storage, len(layers)) as checks, Background() as preparing:
                if compared:
                    background.add(_compare(job, layers))
                scored = background.add(scoring(job, background, layers)) if scoring else None
                self.driver(job, journal=checks, background=background).run()
                if compared:
                    preparing.submit(_prepare_assembly, job)
                background.finish()
                self._cleaner(job).retain_activations(())
                job.observer.stage("verify")
                with interrupting(job.stop):
                    damaged = checks.damaged()
            if not damaged and (not compared or _is_compared(job, layers)):
                return scored.outcome if scored else None
            if damaged and attempt < REPAIRS:
                job.observer.repaired("; ".join(damaged.values()), list(damaged))
        raise CorruptError("; ".join(damaged.values()) or "staged layers cannot be read, though they are undamaged")

    def take_statistics(self, job: JobContext, work: Job) -> None:
        """What the passes over the text give to `work`, entered in the ledger."""
        self.driver(job, work).prepare()

    def scorer_in_background(
        self, job: JobContext, background: BackgroundPool, first: Callable[[], bool] = lambda: True
    ) -> Scorer:
        """Of a model that is scored while others use the workers: its hidden states are committed when they do no more,
        and it is the `first` of those that are scored side by side."""
        cleaner = StoreCleaner(job.run_dir, self.always, self.dropping, lambda: False)
        layers = job.inputs.geometry.num_layers
        return Scorer(
            background, job.ledger, cleaner, job.observer, layers, self.every, lambda: background.alone and first()
        )

    def driver(
        self,
        job: JobContext,
        work: Job | None = None,
        journal: Journal | None = None,
        background: BackgroundPool | None = None,
    ) -> Driver:
        """Of a job, or of a part of its work. `journal`, `background`: in place of its ledger, and of these workers."""
        cleaner = self._cleaner(job, lambda: background is None or not background.begun)
        work = replace(work or driver_job(job.inputs), every=self.every)
        return Driver(work, background or self.pool, journal or job.ledger, cleaner, job.observer)

    def _cleaner(self, job: JobContext, alone: Callable[[], bool] = lambda: True) -> StoreCleaner:
        entries = [job.ledger.get(key) for key in job.ledger.keys(SCORED)]
        scored = [record for entry in entries if entry for record in entry.activations]  # it will go on from there
        return StoreCleaner(job.run_dir, [*self.always, *scored], self.dropping, alone)


def _prepare_assembly(job: JobContext) -> None:
    """What assembling OUTPUT would take longest for: importing what a model is made of. Not earlier, as it stays in
    memory."""
    with quick_imports():
        count_dense(job.inputs.config)


def _compare(job: JobContext, layers: LayersEntered) -> TaskStream[None]:
    """Enters what the staged layers do on a few tokens beside the dense ones: `verify` measures it again.

    Some layers at a time, when they are there; by one worker, as what leaves them enters the next.
    """
    if all(map(layers.there, range(len(layers)))) and _is_compared(job, layers):
        return
    (origin, tokens), before = _sampled(job), None
    figures: dict[str, Any] = {"layer_errors": (), "sketch": ()}
    for first in range(0, len(layers), COMPARED_LAYERS):
        stop = min(first + COMPARED_LAYERS, len(layers))
        while not all(map(layers.there, range(first, stop))):
            yield NOTHING_DUE
        (done,) = yield [Compare(tokens, tuple(layers[first:stop]), first, before, head=stop == len(layers))]
        of_all = {name: (*figures[name], *done.figures[name]) for name in ("layer_errors", "sketch")}
        figures, before = {**done.figures, **of_all}, done.after
    compared = ComparedFigures(origin=origin, tokens=tokens, **figures)
    job.ledger.commit(COMPARED, ComparedEntry(layers=_digests(layers), compared=compared))


def _is_compared(job: JobContext, layers: LayersEntered) -> bool:
    """Whether these layers have been, on these tokens."""
    entered, (_, tokens) = job.ledger.get(COMPARED), _sampled(job)
    return entered is not None and entered.layers == _digests(layers) and entered.compared.tokens == tokens


def _sampled(job: JobContext) -> tuple[Origin, tuple[tuple[int, ...], ...]]:
    """The tokens that are compared on, as they are entered, and where they are from."""
    origin, ids_BS = sample_tokens(job.tokens, job.inputs.config)
    return origin, tuple(map(tuple, ids_BS.tolist()))


def _digests(layers: LayersEntered) -> tuple[str | None, ...]:
    return tuple(staged.sha256 if staged else None for staged in layers)


@contextmanager
def job_workers(job: JobContext, heartbeat: Heartbeat) -> Iterator[JobWorkers]:
    """Workers for all that a job computes. Raises WorkerError when they cannot start."""
    tokens = _stored_tokens(job)
    _sweep(job)
    held_out = job.ledger.get(HELD_OUT)
    always = [tokens] if tokens else []
    always += [held_out.tokens, *(held_out.outputs or ())] if held_out else []
    catch_signals(job.stop)
    setup = worker_config(job, tokens)
    with (
        worker_pool(setup, job.manifest.workers, job.stop, job.observer.say, job.in_process) as pool,
        heartbeat.attending(pool),
        units_logged(pool, job.run_dir.logs, job.name),
        Background() as dropping,
    ):
        job.ledger.commit(HARDWARE, dict(pool.hardware))
        job.observer.show_memory_of(pool.peak_bytes)
        job.observer.expect(job_outlook(job, known_rates(pool.hardware["device"])))
        yield JobWorkers(pool, always, commit_interval(job, pool.hardware), dropping)


def assemble_output(job: JobContext) -> dict[str, Any]:
    """OUTPUT, the index last; returns the compression record. Raises InputError when files of others came in there."""
    interrupt_on_signals(job.stop)
    job.observer.stage("assemble")
    assembler = _assembler(job)
    # Once more: it may be hours since the job began.
    replaceable = survey_output(assembler.output, job.ledger).replaceable()
    layers = [entry.staged for key in job.ledger.keys("layer/") if (entry := job.ledger.get(key))]
    claim_files(job.ledger, assembler.output, assembler.names() | replaceable, layers)
    return assembler.run(replaceable)


def _assembler(job: JobContext) -> Assembler:
    def guard() -> None:
        job.run_dir.lock.check()
        job.watch.check_all()

    return Assembler(job.inputs, job.ledger, job.run_dir.storage, job.source_files, guard)


def _tags(job: JobContext) -> dict[str, Any]:
    """File of the source -> entity tag, of those that are in a bucket."""
    described = {file: found.as_json() for file, found in job.source_files.items()}
    return {file: fields["e_tag"] for file, fields in described.items() if "e_tag" in fields}


def worker_config(job: JobContext, tokens: ArrayRecord | None) -> WorkerConfig:
    """What workers of this job are told."""
    manifest, calibration = job.manifest, job.manifest.calibration
    return WorkerConfig(
        source=replace(job.inputs.source, cache_bytes=int(manifest.workers.cache_gb * 1e9), tags=_tags(job)),
        config=job.inputs.config,
        geometry=job.inputs.geometry,
        run_dir=open_storage(job.run_dir.storage.address),
        tokens=tokens,
        shards=calibration.shards if calibration else manifest.workers.max,
        micro_batch=calibration.micro_batch if calibration else 1,
        dtype=job.inputs.dtype,
        threads=manifest.workers.cpus,
        use_gpu=manifest.workers.gpus > 0,
        gpu_share=manifest.workers.gpus,
        memory_bytes=job.plan.worker_host_bytes,
        device_bytes=job.plan.worker_device_bytes,
        hidden_bytes=int(manifest.workers.activation_memory_gb * 2**30),
        manifest=manifest,
        points=job.points,
        gradient_samples=job.inputs.gradient_samples,
        hardware=job.ledger.get(HARDWARE),
    )


def _stored_tokens(job: JobContext) -> ArrayRecord | None:
    """The record of the calibration tokens, where every worker reads them."""
    if job.tokens is None:
        return None
    store, entered = job.run_dir.activations, job.ledger.get(TOKENS)
    try:
        if entered is not None:
            store.open(entered.tokens).read(0, len(job.tokens))
    except CorruptError as error:
        entered = None  # the fingerprint says that these are the same: written again
        job.observer.repaired(str(error), ["tokens"])
    if entered is None:
        entered = TokensEntry(tokens=store.write_tokens(job.tokens.to(torch.int32)))
        job.ledger.commit(TOKENS, entered)
    return entered.tokens


def _sweep(job: JobContext) -> None:
    """Removes what an interruption left before it was entered; hidden states and moments are the driver's to sweep."""
    job.ledger.sweep()
    job.run_dir.sweep_staged(staged_layers(job.ledger))
    sweep_scratch(job.run_dir.storage)


def staged_layers(ledger: Ledger) -> tuple[StagedRecord, ...]:
    """All that entries name, of a job or of all points of a sweep."""
    layers = [key for key in ledger.keys() if LAYER.search(key)]  # noqa: SIM118 - no mapping
    return tuple(entry.staged for key in layers if (entry := ledger.get(key)))
