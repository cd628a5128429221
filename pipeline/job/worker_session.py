"""The workers of a job: what they start with, and how they compress its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from manifests.entries import ComparedEntry, TokensEntry
from manifests.errors import CorruptError
from manifests.importing import quick_imports
from manifests.records import ArrayRecord, ComparedFigures, Origin, StagedLayer
from pipeline.checkpoint.decoding_cost import count_dense
from pipeline.checkpoint.layer_checks import LayerChecks
from pipeline.console.signals import catch_signals, interrupting
from pipeline.cost_model.rates import known_rates
from pipeline.driver.comparing import compare_layers
from pipeline.driver.driver import Driver
from pipeline.driver.interfaces import BusyPool, Journal
from pipeline.driver.job_spec import Job, LayersEntered, layer_parts
from pipeline.driver.ledger_keys import COMPARED, HARDWARE, HELD_OUT, SCORED, TEACHER, TOKENS
from pipeline.driver.recovery import REPAIRS
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.scoring import Scorer
from pipeline.evaluation.perplexity import sweep_scratch
from pipeline.inputs.calibration import sample_tokens
from pipeline.job.commits import commit_interval
from pipeline.job.context import JobContext, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.remaining_phases import job_eta
from pipeline.job.store_cleaner import StoreCleaner, staged_layers
from pipeline.reporting.unit_log import units_logged
from stores.background import Background
from stores.ledger import Ledger
from stores.storage import open_storage
from workers.config import WorkerConfig
from workers.memory import TRAINING_KERNELS, bound_kernel_caches
from workers.pools import worker_pool

T = TypeVar("T")
Scoring = Callable[[JobContext, Scheduler, LayersEntered], Coroutine[T]]  # scores layers while others are compressed


@dataclass(frozen=True)
class Effort:
    """The work of the workers: kind of unit -> [units, seconds, seconds inside products], worker -> peak bytes."""

    units: dict[str, list[float]]
    peak_bytes: dict[str, int]


class JobWorkers:
    """The workers of a job: they compress its layers, at one size or at several, and score the results.

    Attributes:
        always: stored tokens and hidden states that stay until the job ends.
        every: hidden states are committed each time this many layers are done.
        dropping: the thread that drops replaced ones.
    """

    def __init__(self, pool: BusyPool, always: list[ArrayRecord], every: int, dropping: Background) -> None:
        self.pool = pool
        self.always = always
        self.every = every
        self.dropping = dropping

    @property
    def effort(self) -> Effort:
        """The work done so far."""
        return Effort(self.pool.seconds, dict(self.pool.peak_bytes))

    def scorer(self, job: JobContext, scheduler: Scheduler | None = None) -> Scorer:
        """Return a scorer of models. With `scheduler`, it scores in background fibers, and commits hidden states only
        while no other fibers run."""
        runs, geometry = scheduler or Scheduler(self.pool, job.observer), job.inputs.geometry
        cleaner = StoreCleaner(job.run_dir, self.always, self.dropping, lambda: scheduler is None)
        experts = tuple(layer.num_experts for layer in geometry.layers)
        parts = partial(layer_parts, experts, job.manifest.workers.experts)
        return Scorer(
            runs, job.ledger, cleaner, geometry.num_layers, self.every, lambda: scheduler is None or runs.alone, parts
        )

    def prepare(self, job: JobContext, work: Job | None = None) -> None:
        """Enter everything that ranks depend on. `work`: a part of the job."""
        self.driver(job, work).run(until_ranks=True)

    def compress(self, job: JobContext, *, compared: bool = True, scoring: Scoring[T] | None = None) -> T | None:
        """Stage every claimed layer and enter it in the ledger; a damaged staged layer is compressed again.

        Args:
            job: the job, at a given size.
            compared: one worker also compares the layers with the dense ones; the figures are entered for OUTPUT's
                record.
            scoring: a coroutine that runs in the background.

        Return the result of `scoring`; None without it, or if data that it needed was damaged or lost.

        Raises:
            CorruptError: staged layers are damaged again and again.
            Interrupted: a signal came; entries stay.
        """
        claimed = job.inputs.claimed_layers
        for attempt in range(REPAIRS + 1):
            self.pool.forget()  # hidden states of layers that are compressed again
            layers = LayersEntered(job.ledger, job.inputs.geometry.num_layers, claimed)
            scheduler = Scheduler(self.pool, job.observer)
            with LayerChecks(job.ledger, job.run_dir.storage, len(layers)) as checks, Background() as preparing:
                if compared:
                    scheduler.spawn_background(_compare(job, layers))
                scored = scheduler.spawn_background(scoring(job, scheduler, layers)) if scoring else None
                self.driver(job, journal=checks, scheduler=scheduler).run()
                if compared:
                    preparing.submit(_prepare_assembly, job)
                scheduler.run_background()
                self._cleaner(job).retain_activations(())
                job.observer.stage("verify")
                with interrupting(job.stop):
                    damaged = checks.damaged()
            if not damaged and (not compared or _is_compared(job, layers)):
                return scored.outcome if scored else None
            if damaged and attempt < REPAIRS:
                job.observer.repaired("; ".join(damaged.values()), list(damaged))
        raise CorruptError("; ".join(damaged.values()) or "staged layers cannot be read, though they are undamaged")

    def compare(self, job: JobContext) -> None:
        """Compare the entered layers with the dense ones, unless figures of these layers are entered."""
        layers = LayersEntered(job.ledger, job.inputs.geometry.num_layers, job.inputs.claimed_layers)
        Scheduler(self.pool, job.observer).run(_compare(job, layers))

    def driver(
        self,
        job: JobContext,
        work: Job | None = None,
        journal: Journal | None = None,
        scheduler: Scheduler | None = None,
    ) -> Driver:
        """Return the driver of a job. `work`: a part of it. `journal`: in place of its ledger. `scheduler`: with
        background fibers."""
        runs = scheduler or Scheduler(self.pool, job.observer)
        cleaner = self._cleaner(job, lambda: not runs.background_begun)
        work = replace(work or driver_job(job.inputs), every=self.every)
        return Driver(work, runs, journal or job.ledger, cleaner)

    def _cleaner(self, job: JobContext, alone: Callable[[], bool] = lambda: True) -> StoreCleaner:
        entries = [job.ledger.get(key) for key in job.ledger.keys(SCORED)]
        scored = [record for entry in entries if entry for record in entry.activations]  # scoring resumes from these
        return StoreCleaner(job.run_dir, [*self.always, *scored], self.dropping, alone)


def _prepare_assembly(job: JobContext) -> None:
    """Import modelling code, the longest step of assembling OUTPUT. Not earlier, as it stays in memory."""
    with quick_imports():
        count_dense(job.inputs.config)


def _compare(job: JobContext, layers: LayersEntered) -> Coroutine[None]:
    """Compare the staged layers with the dense ones on a few tokens, and enter the figures: `verify` measures them
    again."""
    if all(map(layers.is_final, range(len(layers)))) and _is_compared(job, layers):
        return
    origin, tokens = _sampled(job)
    figures = yield from compare_layers(layers, tokens)
    compared = ComparedFigures(origin=origin, tokens=tokens, **figures)
    job.ledger.commit(COMPARED, ComparedEntry(layers=_digests(layers), compared=compared))


def _is_compared(job: JobContext, layers: LayersEntered) -> bool:
    """Return True if figures of these layers on these tokens are entered."""
    entered, (_, tokens) = job.ledger.get(COMPARED), _sampled(job)
    return entered is not None and entered.layers == _digests(layers) and entered.compared.tokens == tokens


def _sampled(job: JobContext) -> tuple[Origin, tuple[tuple[int, ...], ...]]:
    """Return the tokens that layers are compared on, and their origin."""
    inputs = job.inputs
    origin, ids_BS = sample_tokens(
        job.tokens, inputs.config, inputs.source.storage, job.manifest.model.trust_remote_code
    )
    return origin, tuple(map(tuple, ids_BS.tolist()))


def _digests(layers: Sequence[StagedLayer | None]) -> tuple[str | None, ...]:
    return tuple(staged.sha256 if staged else None for staged in layers)


@contextmanager
def job_workers(job: JobContext, heartbeat: Heartbeat) -> Iterator[JobWorkers]:
    """Start the workers of a job, and stop them at the end. Raises WorkerError when they cannot start."""
    tokens = _stored_tokens(job)
    _sweep(job)
    held_out = job.ledger.get(HELD_OUT)
    always = [tokens] if tokens else []
    always += [held_out.tokens, *held_out.hidden_states] if held_out else []
    always += teacher_arrays(job.ledger)
    catch_signals(job.stop)
    setup = worker_config(job, tokens)
    if job.in_process and job.manifest.heal is not None:
        bound_kernel_caches(TRAINING_KERNELS)  # for this process trains, too
    with (
        worker_pool(setup, job.manifest.workers, job.stop, job.observer.say, job.in_process) as pool,
        heartbeat.attending(pool),
        units_logged(pool, job.run_dir.logs, job.name),
        Background() as dropping,
    ):
        job.ledger.commit(HARDWARE, dict(pool.hardware))
        job.observer.show_memory_of(pool.peak_bytes)
        if not job.points:  # a sweep knows its phases
            job.observer.expect(job_eta(job, known_rates(pool.hardware["device"])))
        yield JobWorkers(pool, always, commit_interval(job, pool.hardware), dropping)


def worker_config(job: JobContext, tokens: ArrayRecord | None) -> WorkerConfig:
    """Return the settings of the job's workers."""
    manifest, calibration = job.manifest, job.manifest.calibration
    described = {file: record.as_json() for file, record in job.source_files.items()}
    tags = {file: fields["e_tag"] for file, fields in described.items() if "e_tag" in fields}  # of files in a bucket
    return WorkerConfig(
        source=replace(job.inputs.source, cache_bytes=int(manifest.workers.cache_gb * 1e9), tags=tags),
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
        gradient_samples=job.inputs.passes.gradient_samples,
        prefix=len(job.prefix),
        experts=manifest.workers.experts,
        hardware=job.ledger.get(HARDWARE),
        sources=job.sources,
    )


def _stored_tokens(job: JobContext) -> ArrayRecord | None:
    """Return the record of the calibration tokens, which every worker reads. Store them if they are not stored."""
    if job.tokens is None:
        return None
    store, entered = job.run_dir.activations, job.ledger.get(TOKENS)
    try:
        if entered is not None:
            if entered.tokens.shape != tuple(job.tokens.shape):
                entered = None  # of another number of samples
            else:
                store.open(entered.tokens).read(0, len(job.tokens))
    except CorruptError as error:
        entered = None  # the fingerprint covers them, so that the same tokens are written again
        job.observer.repaired(str(error), ["tokens"])
    if entered is None:
        entered = TokensEntry(tokens=store.write_tokens(job.tokens.to(torch.int32)))
        job.ledger.commit(TOKENS, entered)
    return entered.tokens


def _sweep(job: JobContext) -> None:
    """Remove files that an interruption left without an entry. The driver sweeps hidden states and moments."""
    job.ledger.sweep()
    job.run_dir.sweep_staged(staged_layers(job.ledger))
    sweep_scratch(job.run_dir.storage)


def teacher_arrays(ledger: Ledger) -> list[ArrayRecord]:
    """Return the stored arrays of a healing: its tokens, and the dense model's distribution on them."""
    teacher = ledger.get(TEACHER)
    return [teacher.tokens, *teacher.rows, *teacher.outputs] if teacher else []
