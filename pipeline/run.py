"""`python -m pipeline.run MANIFEST`: the job, from a manifest to a checkpoint that loads and scores. DESIGN §2."""

from __future__ import annotations

from pipeline.console.signals import catch_signals, deferred_signals, exit_on_signals, interrupt_on_signals

if __name__ == "__main__":
    exit_on_signals()  # what follows takes seconds

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manifests.errors import CorruptError, InputError
from manifests.loading import dump_manifest, load_manifest
from manifests.schema import RANKS_ONLY, Manifest
from pipeline.checkpoint.assembling import Assembler, free_bytes
from pipeline.checkpoint.compression_record import SEAL, quick_faults
from pipeline.checkpoint.output_directory import claim_files, claim_output, survey_output
from pipeline.console.arguments import parser, run_command
from pipeline.console.progress import JobObserver, open_log
from pipeline.console.summary import print_summary
from pipeline.driver import Driver, Job
from pipeline.evaluation.perplexity import measure_perplexity
from pipeline.job.calibration import calibration_tokens
from pipeline.job.fingerprint import job_fingerprint
from pipeline.job.inputs import Inputs, check_copied, read_inputs
from pipeline.job.ledger_entries import check_entries
from pipeline.methods.registry import allocate_ranks, measure_tasks
from pipeline.plan import make_plan
from pipeline.ports import Record
from pipeline.repair import REPAIRS
from stores.activations import ActivationStore
from stores.durable import write_durably
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.run_directory import RunDirectory
from stores.staging import sweep_staged
from stores.statistics import StatisticsStore
from workers.cluster import connect
from workers.config import WorkerConfig
from workers.memory import peak_bytes
from workers.pool import RayPool


class StoreCleaner:
    """See `pipeline.ports.Cleaner`; the calibration tokens always stay."""

    def __init__(self, activations: ActivationStore, statistics: StatisticsStore, tokens: Record | None) -> None:
        self.activations = activations
        self.statistics = statistics
        self.always = (tokens,) if tokens else ()

    def retain_activations(self, records: tuple[Record, ...]) -> None:
        """Drops all stored hidden states but these."""
        self.activations.sweep((*records, *self.always))

    def retain_statistics(self, records: tuple[Record, ...]) -> None:
        """Drops all stored moments but these."""
        self.statistics.sweep(records)


def run_job(
    manifest: Manifest, *, fresh: bool, address: str | None, stop: threading.Event, quiet: bool = False
) -> dict[str, Any]:
    """Runs a job to its end, or goes on with one that was interrupted. Returns the summary.

    Raises:
        InputError: something given is wrong (exit 2); found before anything expensive.
        Interrupted: `stop` was set; resumable (exit 75).
        LaminaError: the job failed; resumable after a fix (exit 1).
    """
    inputs = read_inputs(manifest)
    tokens = calibration_tokens(inputs)
    output, run_dir = Path(manifest.output), RunDirectory(manifest.run_dir)
    plan = make_plan(manifest, inputs.geometry, inputs.tasks, inputs.dtype.itemsize, inputs.source_bytes)
    with ExitStack() as stack:
        run_dir.prepare(plan.run_dir_bytes)
        lock = stack.enter_context(run_dir.lock)
        claim = stack.enter_context(claim_output(output))
        ledger = run_dir.ledger
        source_files = _source_digests(inputs, ledger)
        if source_files != ledger.get("source"):
            check_copied(inputs)
        found = survey_output(output, ledger)
        replaceable = partial(found.replaceable, fresh)
        if fresh or ledger.get("complete") is None:
            replaceable()  # a finished job may find that nothing is to be written
        adapt = partial(_solve_again, manifest, ledger, replaceable)
        run_dir.check_fingerprint(job_fingerprint(inputs, tokens, source_files), fresh, adapt)
        ledger.commit("source", source_files)
        check_entries(ledger, _job(inputs), inputs.config)
        done = ledger.get("complete")
        finished_here = done is not None and done["output"] == str(output.resolve())
        faults = quick_faults(output, done.get("contract_sha256", "")) if done and finished_here else []
        if done and finished_here and not faults:
            return {**done["summary"], "already_finished": True}
        if replaceable():
            claim_files(ledger, output, replaceable(), ())
        if free_bytes(output) < plan.output_bytes:
            raise InputError(
                f"output: {plan.output_bytes:,} bytes are needed, {free_bytes(output):,} are free at {output}"
            )
        write_durably(run_dir.manifest, dump_manifest(manifest).encode())
        log = open_log(run_dir.logs)
        observer = JobObserver((lock.beat, claim.beat, lambda _: _rescale(observer, run_dir, lock)), quiet=quiet)
        stack.enter_context(observer)
        observer.say(f"log: {log}")
        for fault in faults:
            observer.say(f"repairing: the finished output is damaged: {fault}", logging.WARNING)
        if reused := ledger.get("reused"):
            observer.say(f"statistics of an earlier run serve again: {reused['seconds']:.1f} s of forward passes saved")
        return _compute(inputs, tokens, run_dir, ledger, source_files, observer, address, stop, plan.report())


def _compute(
    inputs: Inputs,
    tokens: torch.Tensor | None,
    run_dir: RunDirectory,
    ledger: Ledger,
    source_files: Mapping[str, Any],
    observer: JobObserver,
    address: str | None,
    stop: threading.Event,
    plan: Mapping[str, Any],
) -> dict[str, Any]:
    started = time.monotonic()
    tokens_record = _stored_tokens(tokens, run_dir.activations, ledger, observer)
    _sweep(run_dir, ledger)
    setup = _setup(inputs, run_dir, tokens_record)
    with deferred_signals(stop):
        observer.say(f"Ray at {connect(address, inputs.manifest.workers)}")
    assembler = Assembler(inputs, ledger, run_dir.path, source_files, run_dir.lock.check)
    for attempt in range(REPAIRS + 1):
        with _pool(setup, inputs, stop, observer) as pool:
            observer.pool = pool
            cleaner = StoreCleaner(run_dir.activations, run_dir.statistics, tokens_record)
            Driver(_job(inputs), pool, ledger, cleaner, observer).run()
            worker_seconds, peaks = pool.seconds, dict(pool.peak_bytes)
        seconds = {"driver": time.monotonic() - started}
        interrupt_on_signals(stop)
        observer.phase("assemble", 1, 1)
        damaged = assembler.damaged_layers()
        if not damaged:
            break
        if attempt == REPAIRS:
            raise CorruptError("; ".join(damaged.values()))
        observer.repaired("; ".join(damaged.values()), list(damaged))
        catch_signals(stop)
    compression = _assemble(assembler, ledger)
    seconds["assemble"] = time.monotonic() - started - seconds["driver"]
    evaluation = {}
    if inputs.manifest.evaluation.perplexity:
        catch_signals(stop)
        evaluation = _evaluate(inputs.manifest, stop, observer)
    summary = {
        "output": inputs.manifest.output,
        "counts": compression["counts"],
        "layers": compression["layers"],
        "evaluation": evaluation,
        "seconds": {
            **seconds,
            "phases": observer.seconds,
            "units": worker_seconds,
            "total": time.monotonic() - started,
        },
        "seconds_saved": (ledger.get("reused") or {}).get("seconds", 0.0),
        "peak_bytes": {"driver": peak_bytes(), "workers": peaks},
        "plan": dict(plan),
    }
    output = str(Path(inputs.manifest.output).resolve())
    ledger.commit("complete", {"output": output, "contract_sha256": compression[SEAL], "summary": summary})
    return summary


def _assemble(assembler: Assembler, ledger: Ledger) -> dict[str, Any]:
    """Looks once more whose files are in OUTPUT: it may be hours since the job began."""
    replaceable = survey_output(assembler.output, ledger).replaceable(fresh=False)
    layers = [entry["staged"] for key in ledger.keys("layer/") if (entry := ledger.get(key))]
    claim_files(ledger, assembler.output, assembler.names() | replaceable, layers)
    return assembler.run(replaceable)


def _rescale(observer: JobObserver, run_dir: RunDirectory, lock: RunLock) -> None:
    """Does what `pipeline.scale` asked for."""
    workers = run_dir.workers_asked_for(lock.token)
    if workers is not None and observer.pool is not None:
        observer.pool.resize(workers)


def _job(inputs: Inputs) -> Job:
    manifest, calibration = inputs.manifest, inputs.manifest.calibration
    propagate = calibration.propagate if calibration else "dense"
    keep = manifest.statistics.keep
    return Job(
        num_layers=inputs.geometry.num_layers,
        shards=calibration.shards if calibration else 1,
        tasks=inputs.tasks,
        allocate=lambda scores: allocate_ranks(manifest, inputs.methods, inputs.geometry, scores),
        scores=inputs.scores,
        propagate=propagate,
        every=manifest.resume.every,
        keep_statistics=propagate == "dense" if keep is None else keep,
        measures=measure_tasks(inputs.methods, inputs.geometry),
    )


def _setup(inputs: Inputs, run_dir: RunDirectory, tokens: Record | None) -> WorkerConfig:
    manifest, calibration = inputs.manifest, inputs.manifest.calibration
    return WorkerConfig(
        source=inputs.source,
        config=inputs.config,
        geometry=inputs.geometry,
        run_dir=run_dir.path.resolve(),
        tokens=tokens,
        shards=calibration.shards if calibration else manifest.workers.max,
        micro_batch=calibration.micro_batch if calibration else 1,
        dtype=inputs.dtype,
        threads=manifest.workers.cpus,
        use_gpu=manifest.workers.gpus > 0,
        hidden_bytes=int(manifest.workers.activation_memory_gb * 2**30),
        manifest=manifest,
    )


@contextmanager
def _pool(setup: WorkerConfig, inputs: Inputs, stop: threading.Event, observer: JobObserver) -> Iterator[RayPool]:
    workers = inputs.manifest.workers
    if workers.max > setup.shards:
        observer.say(
            f"workers.max: {workers.max} is more than the {setup.shards} shards; the rest would be idle",
            logging.WARNING,
        )
    pool = RayPool(setup, workers, stop, observer.say)
    try:
        yield pool
    finally:
        pool.close()


def _evaluate(manifest: Manifest, stop: threading.Event, observer: JobObserver) -> dict[str, Any]:
    assert manifest.evaluation.perplexity is not None
    wanted = manifest.evaluation.perplexity
    found = measure_perplexity(
        manifest.output,
        wanted.text,
        wanted.window,
        manifest.workers,
        torch.float32,
        stop,
        observer,
        trust_remote_code=manifest.model.trust_remote_code,
    )
    observer.say(f"perplexity {found['perplexity']:.4f} over {found['tokens']:,} tokens")
    return {"perplexity": found}


def _sweep(run_dir: RunDirectory, ledger: Ledger) -> None:
    """Removes what an interruption left before it was entered; hidden states and moments are the driver's to sweep."""
    ledger.sweep()
    entered = [ledger.get(key) for key in ledger.keys("layer/")]
    sweep_staged(run_dir.path, [entry["staged"] for entry in entered if entry])


def _stored_tokens(
    tokens: torch.Tensor | None, store: ActivationStore, ledger: Ledger, observer: JobObserver
) -> Record | None:
    if tokens is None:
        return None
    entered = ledger.get("tokens")
    try:
        if entered is not None:
            store.open(entered["tokens"]).read(0, len(tokens))
    except CorruptError as error:
        entered = None  # the fingerprint says that these are the same: written again
        observer.repaired(str(error), ["tokens"])
    if entered is None:
        entered = {"tokens": store.write_tokens(tokens.to(torch.int32))}
        ledger.commit("tokens", entered)
    record: Record = entered["tokens"]
    return record


def _source_digests(inputs: Inputs, ledger: Ledger) -> dict[str, Any]:
    """File -> size, times and sha256; a file that looks as it did is not read again."""
    return inputs.source.file_digests(ledger.get("source") or {})


def _solve_again(manifest: Manifest, ledger: Ledger, check: Callable[[], object], differing: list[str]) -> bool:
    """Whether ranks are all that differs, and the statistics do not depend on them: then all later work is undone.

    `check` is called before anything is.
    """
    names = [name.removeprefix("manifest.") for name in differing if name.startswith("manifest.")]
    ranks_only = len(names) == len(differing) and all(map(RANKS_ONLY.fullmatch, names))
    if not ranks_only or manifest.calibration is None or manifest.calibration.propagate != "dense":
        return False
    check()
    summary = (ledger.get("complete") or {}).get("summary", {})
    seconds = summary.get("seconds_saved", 0.0) + summary.get("seconds", {}).get("phases", {}).get("statistics", 0.0)
    if summary:
        ledger.commit("reused", {"seconds": seconds})
    for key in ("complete", *ledger.keys("layer/"), "ranks", *ledger.keys("measured/")):
        ledger.retract(key)
    return True


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = parser("run", "Compresses a model by a manifest; run again, it goes on where it was.")
    options.add_argument("manifest", help="the job, in YAML")
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="overrides a manifest field")
    options.add_argument("--fresh", action="store_true", help="start over, whatever the run directory holds")
    options.add_argument("--address", help="a running Ray cluster; default: RAY_ADDRESS, or a local one")
    options.add_argument("--json", action="store_true", help="print the summary as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    stop = threading.Event()
    interrupt_on_signals(stop)
    manifest = load_manifest(arguments.manifest, arguments.set)
    with redirect_stdout(sys.stderr):  # Ray prints what its nodes say, which is no JSON
        summary = run_job(manifest, fresh=arguments.fresh, address=arguments.address, stop=stop)
    if arguments.json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
