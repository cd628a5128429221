"""The stage that heals: the compressed layers are trained as a whole against the dense model. docs/methods.md#healing.

It begins with the solved layers, which stay staged. Order of durability: the healed layers are staged, then the entry
of the finished job is retracted, then the healing is entered; OUTPUT is assembled from it like from any other layers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from manifests.entries import KINDS, HealedEntry, LayerEntry
from manifests.errors import CorruptError
from manifests.heal import Heal
from manifests.records import E, LedgerKey
from pipeline.driver.ledger_dependencies import kind_of
from pipeline.driver.ledger_keys import COMPARED, COMPLETE, HEALED, HEALING, HELD_OUT_SCORE, TEACHER, layer_key
from pipeline.inputs.calibration import tokens_digest
from pipeline.inputs.healing_text import HealingTokens
from pipeline.job.context import JobContext, healing_tokens
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.held_out import score_held_out
from pipeline.job.student_training import Healing, train_student
from pipeline.job.teacher import WorkerStarter, digest_of, stored_teacher
from pipeline.job.worker_session import job_workers, teacher_arrays
from stores.checkpoint import verify_shard
from stores.ledger import Ledger, LedgerView

OWN = "after_healing"
OWN_KINDS = (COMPARED, HELD_OUT_SCORE)
TRIES = 3  # attempts at a training whose stored data is damaged


def heal_layers(job: JobContext, heartbeat: Heartbeat) -> JobContext:
    """Heal the compressed layers if the manifest asks for it, once. Return the job with the layers to be assembled:
    the healed ones if a healing, in this run or an earlier one, has made them better.

    Raises:
        InputError: a stored form does not train.
        NumericsError: gradients are not finite.
        Interrupted: a signal came; the training continues from its last checkpoint.
    """
    entered = train_layers(job, partial(job_workers, job, heartbeat))
    if entered is None or not entered.layers:
        return job
    healed = healed_job(job, entered)
    job.observer.stage("start")
    with job_workers(healed, heartbeat) as workers:
        workers.compare(healed)
        score_held_out(healed, workers)
    return healed


def train_layers(job: JobContext, pool: WorkerStarter) -> HealedEntry | None:
    """Train the compressed layers if the manifest asks for it, once. Return the finished healing, of this run or
    an earlier one; None without one. `pool` starts workers for the teacher's pass. Raises the errors of
    `heal_layers`."""
    healing, entered = _asked(job), _entered(job)
    if healing is not None and (entered is None or entered.of != healing.of):
        entered = _heal(job, healing, pool)
    if entered is not None:
        _drop_training(job, entered)
    return entered


def healed_job(job: JobContext, entered: HealedEntry) -> JobContext:
    """Return the job with the healed layers in place of the solved ones."""
    return replace(job, run_dir=job.run_dir.with_ledger(HealedLedger(job.ledger, entered)))


def healing_due(job: JobContext) -> bool:
    """Return True if the manifest asks for a healing that is not entered."""
    healing, entered = _asked(job), _entered(job)
    return healing is not None and (entered is None or entered.of != healing.of)


def check_healing(job: JobContext) -> None:
    """Raise InputError if the job cannot be healed, before anything is computed."""
    if job.manifest.heal is None:
        return
    if job.tokens is not None or job.healing_text is not None:
        healing_tokens(job)


def _asked(job: JobContext) -> Healing | None:
    """Return the healing that the manifest asks for; None without one, or before all layers are entered."""
    settings = job.manifest.heal
    if settings is None:
        return None
    tokens, base = healing_tokens(job), _base(job)
    return Healing(settings, tokens, base, digest_of({**_described(job, settings, tokens), "base": base}))


def healing_digest(job: JobContext) -> str | None:
    """Return a digest of the settings and of the text of the healing that the manifest asks for; None without one."""
    settings = job.manifest.heal
    return None if settings is None else digest_of(_described(job, settings, healing_tokens(job)))


def _described(job: JobContext, settings: Heal, tokens: HealingTokens) -> dict[str, Any]:
    return {
        "settings": settings.model_dump(mode="json", exclude={"text", "tokens"}),
        "trained": tokens_digest(tokens.trained),
        "held_out": tokens_digest(tokens.held_out),
        "prefix": tokens.prefix,
        "seed": job.manifest.seed,
    }


def _entered(job: JobContext) -> HealedEntry | None:
    """Return the finished healing of the entered layers, if its files are whole."""
    entered = job.ledger.get(HEALED)
    if entered is None or entered.base != _base(job):
        return None
    for staged in entered.layers.values():
        try:
            verify_shard(job.run_dir.storage, staged.path, staged)
        except CorruptError as error:
            job.observer.repaired(str(error), [HEALED])
            job.ledger.retract(HEALED)
            return None
    return entered


def _base(job: JobContext) -> tuple[str | None, ...]:
    """Return the digests of the solved layers."""
    entries = (job.ledger.get(layer_key(layer)) for layer in range(job.inputs.geometry.num_layers))
    return tuple(entry.staged.sha256 if entry else None for entry in entries)


def _heal(job: JobContext, healing: Healing, pool: WorkerStarter) -> HealedEntry:
    """Train, stage the healed layers if they are better, and enter the healing."""
    teacher = stored_teacher(job, pool)
    for left in range(TRIES - 1, -1, -1):
        try:
            figures, layers, trained = train_student(job, healing, teacher)
            break
        except CorruptError as error:
            of_teacher = error.path in {record.path for record in teacher_arrays(job.ledger)}
            damaged = TEACHER if of_teacher else HEALING
            job.ledger.retract(damaged)
            if not left:
                raise
            job.observer.repaired(str(error), [damaged])
            teacher = stored_teacher(job, pool)
    if not layers:
        job.observer.say(
            f"heal: no step came closer to the dense model on held-out text than the start ({figures['before']:.4f} "
            "nats per token); OUTPUT is that of the solve",
            logging.WARNING,
        )
    job.ledger.retract(COMPLETE)  # its OUTPUT is no longer that of the layers
    forget_figures(job.ledger)
    entered = HealedEntry(of=healing.of, base=healing.base, layers=layers, trained=trained, figures=figures)
    job.ledger.commit(HEALED, entered)
    return entered


def _drop_training(job: JobContext, entered: HealedEntry) -> None:
    """Drop the last checkpoint of the training of a finished healing, of this run or of a killed one."""
    begun = job.ledger.get(HEALING)
    if begun is not None and begun.of == entered.of:
        from pipeline.healing.checkpoints import sweep_states

        sweep_states(job.run_dir.storage, None)
        job.ledger.retract(HEALING)  # last, because it names the data to be dropped


class HealedLedger(LedgerView):
    """A view of a job's ledger after its healing. Its layers are the healed ones. `OWN_KINDS`, the figures that compare
    both models, are its own."""

    def __init__(self, whole: Ledger, healed: HealedEntry) -> None:
        super().__init__(whole, OWN, {kind: "" for kind in KINDS if kind not in OWN_KINDS})
        self.healed = healed

    def get(self, key: LedgerKey[E]) -> E | None:
        entry: Any = super().get(key)
        layer = key.rpartition("/")[2]
        if isinstance(entry, LayerEntry) and (staged := self.healed.layers.get(str(int(layer)))):
            entry = entry.model_copy(update={"staged": staged})
        return entry  # type: ignore[no-any-return] # of the key's class

    def keys(self, prefix: str = "") -> list[LedgerKey[Any]]:
        """Return the committed keys that begin with `prefix`, ascending."""
        job = [key for key in self.whole.keys(prefix) if kind_of(key) not in (OWN, *OWN_KINDS)]
        return sorted([*job, *super().keys(prefix)])


def forget_figures(ledger: Ledger) -> None:
    """Retract the figures of an earlier healing."""
    for key in ledger.keys(f"{OWN}/"):
        ledger.retract(key)
