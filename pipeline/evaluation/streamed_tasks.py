"""Scores on lm-eval's tasks by the workers of a job: all questions of all tasks pass one layer after the other."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lamina import LayersConfig
from manifests.entries import AnswersEntry
from manifests.records import ArrayRecord, StagedRecord
from pipeline.console.paths import prepare_folder
from pipeline.driver.ledger_keys import answers_key
from pipeline.driver.scheduler import Scheduler
from pipeline.driver.scoring import Scorer
from pipeline.evaluation.perplexity import SCRATCH_PREFIX, Scoring, open_checkpoint, parts_of_layers, worker_setup
from pipeline.evaluation.questions import Answered, Question, in_order, packed, windows_of
from pipeline.evaluation.task_scores import AskedTasks, Scores, load_tasks, run_tasks
from pipeline.families.foreign import sequence_limit
from pipeline.units.questions import Answers, Questions
from stores.activations import ActivationStore
from stores.corpus import load_tokenizer
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.model_files import CONFIG_FILE
from stores.run_directory import ACTIVATIONS, LEDGER
from stores.source import SourceCheckpoint
from stores.storage import Place, Storage, is_address, open_storage
from workers.pools import worker_pool

CPU_TOKENS, GPU_TOKENS = 512, 8192  # that go through a layer at a time, about; results on a CPU stay in its caches
NEVER = 2**31


@dataclass(frozen=True)
class Kept:
    """A folder in which a pass resumes.

    Attributes:
        storage: of the folder. Its owner holds a lock, so that one process writes at a time.
        every: the number of layers between two commits of hidden states.
        model: names the model's files.
    """

    storage: Storage
    every: int
    model: str


def score_streamed(
    model: str,
    asked: AskedTasks,
    scoring: Scoring,
    *,
    start: Callable[[], None] = lambda: None,
    kept: Callable[[SourceCheckpoint], Kept] | None = None,
    trust_remote_code: bool = False,
) -> Scores:
    """Score a dense or compressed checkpoint on tasks of log-likelihoods.

    Args:
        start: called once model and tasks are checked, before any worker is started.
        kept: returns the folder in which the passes of a checkpoint resume; None: they do not.
        trust_remote_code: run Python of the checkpoint as its tokenizer.

    Raises:
        InputError: the model is wrong, its tokenizer lacks the chat template that is asked for, or the errors of
            `load_tasks`.
        Interrupted: `stop` was set.
    """
    source, config = open_checkpoint(model, 1, trust_remote_code)
    tokenizer = load_tokenizer(source.storage, trust_remote_code)
    asked.check_template(tokenizer, model)
    loaded = load_tasks(asked, generates=False)
    start()
    from pipeline.evaluation.streamed_lm import StreamedLM  # imports lm-eval

    passes = _CheckpointPasses(source, config, scoring, kept(source) if kept else None)
    return run_tasks(StreamedLM(tokenizer, sequence_limit(config)[1], passes.answers), model, asked, loaded)


@dataclass(frozen=True)
class CountedPass:
    """The size of a pass: tokens without padding, places that are scored, and the mean length of windows."""

    tokens: int
    places: int
    window: int


def count_tokens(
    source: SourceCheckpoint, config: Mapping[str, Any], asked: AskedTasks, trust_remote_code: bool, held: int
) -> list[CountedPass]:
    """Return the passes of tasks through a model, without running one. `held`: as in `can_branch`.

    Raises InputError: the tasks cannot be loaded.
    """
    loaded = load_tasks(asked, generates=False)
    from pipeline.evaluation.streamed_lm import StreamedLM  # imports lm-eval

    counted: list[CountedPass] = []

    def count(_: str, questions: Sequence[Question], most: int) -> Answered:
        windows = windows_of(questions, most, can_branch(config, held))
        tokens = sum(len(window.ids) for window in windows)
        counted.append(CountedPass(tokens, sum(len(window.places) for window in windows), tokens // len(windows)))
        return [(0.0, False)] * len(questions)

    lm = StreamedLM(load_tokenizer(source.storage, trust_remote_code), sequence_limit(config)[1], count)
    run_tasks(lm, source.place, asked, loaded)
    return counted


@dataclass(frozen=True)
class _CheckpointPasses:
    """The passes of one checkpoint."""

    source: SourceCheckpoint
    config: Mapping[str, Any]
    scoring: Scoring
    kept: Kept | None

    def answers(self, name: str, questions: Sequence[Question], most: int) -> Answered:
        """Return the answers to questions, in order. `most`: the most tokens of a window."""
        if not questions:
            return []
        windows = windows_of(questions, most, can_branch(self.config, self.scoring.workers.experts))
        shards, numbers = packed(windows)
        with self._place() as place:
            setup = worker_setup(self.source, self.config, self.scoring, place, numbers)
            setup = replace(setup, shards=len(shards))
            dtype = str(setup.dtype).removeprefix("torch.")
            model = self.kept.model if self.kept else ""
            batch = batch_tokens(setup.use_gpu)
            digest = questions_digest(numbers, model, dtype, shards, batch)
            passed = Questions.of_shards(shards, dtype, batch, digest)
            ledger = Ledger(open_storage(place).below(LEDGER))
            entered = ledger.get(answers_key(name))
            if entered is None or entered.of != digest:
                tokens = sum(len(window.ids) for window in windows)
                self.scoring.observer.say(
                    f"{name}: {len(questions):,} questions in {len(windows):,} windows, {tokens:,} tokens through "
                    f"{len(parts_of_layers(self.config, 1))} layers"
                )
                answered = in_order(self._passed(name, passed, setup, ledger), len(questions))
                logs, greedy = zip(*answered, strict=True)
                entered = AnswersEntry(of=digest, logs=logs, greedy=greedy)
                ledger.commit(answers_key(name), entered)
        return list(zip(entered.logs, entered.greedy, strict=True))

    @contextmanager
    def _place(self) -> Iterator[Place]:
        """Yield the kept folder, or one that is removed in the end."""
        if self.kept is not None:
            yield self.kept.storage
            return
        scratch = self.scoring.scratch
        with tempfile.TemporaryDirectory(dir=scratch and os.path.abspath(scratch), prefix=SCRATCH_PREFIX) as directory:
            yield directory

    def _passed(self, name: str, questions: Questions, setup: Any, ledger: Ledger) -> list[Answers]:
        scoring, parts = self.scoring, parts_of_layers(self.config, self.scoring.workers.experts)
        cleaner = _Cleaner(ActivationStore(open_storage(setup.run_dir).below(ACTIVATIONS)))
        every = self.kept.every if self.kept else NEVER
        scoring.observer.stage("start")
        with worker_pool(setup, scoring.workers, scoring.stop, scoring.observer.say, scoring.in_process) as pool:
            scoring.observer.show_memory_of(pool.peak_bytes)
            scorer = Scorer(
                Scheduler(pool, scoring.observer),
                ledger,
                cleaner,
                len(parts),
                every,
                parts=lambda layer, _: parts[layer],
                phase="" if self.kept else "evaluate",  # nothing is committed
            )
            answers = scorer.answers(questions, name, (None,) * len(parts))
            scorer.forget(name)
        open_storage(setup.run_dir).delete_folder(ACTIVATIONS)
        return answers


class _Cleaner:
    """Drops hidden states of a pass that are replaced by later ones."""

    def __init__(self, activations: ActivationStore) -> None:
        self.activations = activations

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop all stored hidden states but these. No worker writes meanwhile."""
        self.activations.sweep(records)

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop these stored hidden states."""
        self.activations.drop(*records)

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Do nothing, as there are no statistics."""

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Do nothing, as no layer is staged."""


def can_branch(config: Mapping[str, Any], held: int) -> bool:
    """Return True if continuations of a context can share its window: each layer has attention of this project's own
    class, and its experts are held at once. `held`: the experts that a worker holds at a time."""
    layers = LayersConfig(**config)
    whole = all(list(parts) == [None] for parts in parts_of_layers(config, held))
    return whole and not layers.foreign and {*layers.layer_types} <= {"full_attention", "sliding_attention"}


def batch_tokens(use_gpu: bool) -> int:
    """Return the number of tokens that go through a layer at a time, about."""
    return GPU_TOKENS if use_gpu else CPU_TOKENS


def questions_digest(numbers: torch.Tensor, *parts: Any) -> str:
    """Return a digest of the numbers of questions, and of further parts."""
    content = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    return hashlib.sha256(json.dumps([content, parts], default=str).encode()).hexdigest()


@contextmanager
def kept_in(folder: str | None, every: int) -> Iterator[Callable[[SourceCheckpoint], Kept] | None]:
    """Yield a function that returns a checkpoint's part of a folder, whose lock is held; None without a folder.

    `folder`: a path, or the address of a folder in a bucket. `every`: the number of layers between two commits.

    Raises InputError if the folder cannot be used, InUseError if another process uses it.
    """
    if folder is None:
        yield None
        return
    storage = prepare_folder("--run-dir", folder if is_address(folder) else os.path.abspath(folder))

    def part(source: SourceCheckpoint) -> Kept:
        stamps = {file: source.file_stamp(file) for file in (CONFIG_FILE, *source.files)}
        named = hashlib.sha256(json.dumps([source.place, stamps]).encode()).hexdigest()
        return Kept(storage.below(f"model-{named[:16]}"), every, named)

    with RunLock(storage):
        yield part
