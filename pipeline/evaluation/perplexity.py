"""Perplexity of a checkpoint, dense or compressed, streamed layer by layer through the same workers as a job."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lamina import LayersConfig
from manifests.errors import InputError
from manifests.evaluation import Perplexity
from manifests.schema import Workers
from pipeline.console.progress import JobObserver
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.scoring import window_units
from pipeline.evaluation.losses import check_dense_loss, json_perplexity
from pipeline.families.foreign import sequence_limit
from pipeline.families.registry import geometry_of
from pipeline.inputs.calibration import EvaluationTokens, window_tokens
from pipeline.inputs.checkpoints import expected_tensors, read_checkpoint
from pipeline.inputs.job_inputs import layer_dtype
from pipeline.units.scores import Score, Scored, Windows
from pipeline.units.sharding import expert_parts
from stores.source import SourceCheckpoint
from stores.storage import Place, Storage
from workers.config import WorkerConfig
from workers.pools import worker_pool

SHARDS = 16  # fixed, so that the sum does not depend on the number of workers
SCRATCH_PREFIX = "evaluation-"
MODEL = "checkpoint"
NUMBERS_PER_BATCH = 4096  # tokens in a micro-batch, about


@dataclass(frozen=True)
class Scoring:
    """The settings of an evaluation.

    Attributes:
        dtype: of the forward pass; None: as stored. The log-softmax is always float32.
        stop: ends the evaluation when it is set.
        scratch: folder for hidden states beyond a worker's memory; None: the temporary folder of its node.
        in_process: compute in this process, without Ray.
        accept_loss: any loss of a dense model is returned, as in the manifest's `model.accept_loss`.
    """

    workers: Workers
    dtype: torch.dtype | None
    stop: threading.Event
    observer: JobObserver
    scratch: str | os.PathLike[str] | None = None
    in_process: bool = False
    accept_loss: bool = False


def measure_perplexity(
    model: str,
    asked: Perplexity,
    scoring: Scoring,
    *,
    start: Callable[[], None] = lambda: None,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure token-level perplexity over non-overlapping windows. Every token of the text is scored, but for the first
    one of a window without a prefix.

    Args:
        asked: the text, the window and its prefix.
        start: called once model and text are checked, before any worker is started.
        limit: the number of windows to score, from the first on.
        trust_remote_code: run Python of the checkpoint as its tokenizer.

    Raises:
        InputError: model or text is wrong, or a dense model's loss shows that something was read wrongly.
        Interrupted: `stop` was set.
    """
    source, config = open_checkpoint(model, asked.window, trust_remote_code)
    tokens = window_tokens(source.storage, asked, config["vocab_size"], trust_remote_code)
    for line in tokens.read.left_out():
        scoring.observer.say(line)
    start()
    figures = _score(source, config, replace(tokens, ids=tokens.ids[:limit]), scoring)
    if not scoring.accept_loss and config.get("model_type") != "lamina":
        check_dense_loss(
            figures["loss"], config["vocab_size"], "the text", "if its weights are random, add --accept-loss"
        )
    return {**figures, "skipped_rows": tokens.read.refused(), "text_read": tokens.read.as_json()}


def score_tokens(model: str, tokens: EvaluationTokens, scoring: Scoring) -> dict[str, Any]:
    """Measure perplexity as `measure_perplexity`. Raises InputError (the model is wrong) and Interrupted."""
    return _score(*open_checkpoint(model, tokens.ids.shape[1]), tokens, scoring)


def open_checkpoint(model: str, window: int, code: bool = False) -> tuple[SourceCheckpoint, Mapping[str, Any]]:
    """Open a checkpoint for windows of this length. Raises InputError. `code`: trust its Python."""
    source, config = read_checkpoint(model, code)
    if config.get("model_type") == "lamina":
        source.require(expected_tensors(config))
    name, limit = sequence_limit(config)
    if window > limit:
        raise InputError(f"window: {window} is longer than the model's {name} {limit}")
    return source, config


def _score(
    source: SourceCheckpoint, config: Mapping[str, Any], tokens: EvaluationTokens, scoring: Scoring
) -> dict[str, Any]:
    workers, observer, scratch = scoring.workers, scoring.observer, scoring.scratch
    num_windows = len(tokens.ids)
    with tempfile.TemporaryDirectory(dir=scratch and os.path.abspath(scratch), prefix=SCRATCH_PREFIX) as directory:
        setup = worker_setup(source, config, scoring, directory, tokens.ids)
        name, prefix = str(setup.dtype).removeprefix("torch."), len(tokens.prefix)
        windows = Windows.even(num_windows, setup.shards, name, setup.micro_batch, prefix=prefix)
        observer.stage("start")
        with worker_pool(setup, workers, scoring.stop, observer.say, scoring.in_process) as pool:
            parts = parts_of_layers(config, workers.experts)
            scored = Scheduler(pool, observer).run(_score_windows(windows, parts, observer))
    return perplexity_figures(scored, tokens)


def worker_setup(
    source: SourceCheckpoint, config: Mapping[str, Any], scoring: Scoring, place: Place, numbers: torch.Tensor
) -> WorkerConfig:
    """Return the settings of workers that score a checkpoint.

    `place`: of hidden states that are stored. `numbers`: rows of token ids.
    """
    workers = scoring.workers
    return WorkerConfig(
        source=source,
        config=config,
        geometry=geometry_of(config),
        run_dir=place,
        tokens=None,
        shards=min(SHARDS, len(numbers)),
        micro_batch=max(1, NUMBERS_PER_BATCH // numbers.shape[1]),
        dtype=scoring.dtype or _stored_dtype(source, config),
        threads=workers.cpus,
        use_gpu=workers.gpus > 0,
        gpu_share=workers.gpus,
        hidden_bytes=int(workers.activation_memory_gb * 2**30),
        experts=workers.experts,
        token_ids=numbers.to(torch.int32),  # through Ray: other nodes do not see a folder of this one
    )


def perplexity_figures(scored: Scored, tokens: EvaluationTokens) -> dict[str, Any]:
    """Return the score of windows as JSON."""
    loss, (windows, window) = scored.loss / scored.tokens, tokens.ids.shape
    figures = {"perplexity": json_perplexity(loss), "loss": loss}
    return {**figures, "tokens": scored.tokens, "windows": windows, "window": window, "prefix": list(tokens.prefix)}


def _stored_dtype(source: SourceCheckpoint, config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype")  # of a compressed checkpoint, whose bitmaps are bytes
    return getattr(torch, name) if name else layer_dtype(source, geometry_of(config))


def sweep_scratch(run_dir: Storage) -> None:
    """Remove the scratch folders of killed evaluations."""
    for folder in run_dir.folders():
        if folder.startswith(SCRATCH_PREFIX):
            run_dir.delete_folder(folder)


def parts_of_layers(config: Mapping[str, Any], held: int) -> list[Sequence[int | None]]:
    """Return the parts of each layer, as `expert_parts`. `held`: the experts that a worker holds at a time."""
    layers = LayersConfig(**config)
    mixtures = map(layers.layer_mixture, range(layers.num_hidden_layers))
    return [expert_parts(sizes.experts if sizes else 0, held) for sizes in mixtures]


def _score_windows(windows: Windows, parts: Sequence[Sequence[int | None]], observer: JobObserver) -> Coroutine[Scored]:
    """Score all windows through the layers, part by part, and the head. Scores are added in shard order."""
    num_layers = len(parts)
    observer.phase("evaluate", num_layers, windows.shards)
    layers = (None,) * num_layers
    for layer, numbers in enumerate(parts):
        for part in numbers:
            yield window_units(windows, MODEL, layers, layer, part=part)
        observer.layer_done("evaluate", layer, {})
    scores = yield [Score(windows, MODEL, num_layers, shard, replay=layers) for shard in range(windows.shards)]
    return sum(scores, Scored(0.0, 0))
