"""Perplexity of a checkpoint, dense or compressed, streamed layer by layer through the same workers as a job."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from manifests.errors import InputError
from manifests.schema import Text, Workers
from pipeline.console.progress import JobObserver
from pipeline.driver.interfaces import Pool
from pipeline.driver.scheduler import Scheduler, TaskStream
from pipeline.driver.scoring import window_units
from pipeline.evaluation.losses import json_perplexity
from pipeline.families.registry import geometry_of
from pipeline.inputs.calibration import window_tokens
from pipeline.inputs.checkpoints import expected_tensors, read_checkpoint
from pipeline.inputs.job_inputs import layer_dtype
from pipeline.units.scores import Score, Scored, Windows
from stores.source import SourceCheckpoint
from stores.storage import Storage
from workers.config import WorkerConfig
from workers.pools import worker_pool

SHARDS = 16  # fixed, so that the sum does not depend on the number of workers
SCRATCH_PREFIX = "evaluation-"
MODEL = "checkpoint"
NUMBERS_PER_BATCH = 4096  # tokens in a micro-batch, about


def measure_perplexity(
    model: str,
    text: Text,
    window: int,
    workers: Workers,
    dtype: torch.dtype | None,
    stop: threading.Event,
    observer: JobObserver,
    scratch: str | os.PathLike[str] | None = None,
    start: Callable[[], None] = lambda: None,
    limit: int | None = None,
    trust_remote_code: bool = False,
    in_process: bool = False,
) -> dict[str, Any]:
    """Token-level perplexity over non-overlapping windows; every token but a window's first is scored.

    Args:
        limit: score only the first so many windows.
        scratch: where a worker puts hidden states that exceed its memory; default: the temporary folder of its node.
        trust_remote_code: whether the tokenizer may be code of the checkpoint.
        in_process: compute in this process, without Ray.
        start: called when model and text proved right, before any worker is started.

    Raises:
        InputError: model or text is wrong.
        Interrupted: `stop` was set.
    """
    opened = open_scored(model, window, trust_remote_code)
    source, config = opened
    tokens = window_tokens(source.storage, text, window, config["vocab_size"], trust_remote_code)[:limit]
    start()
    return _score(opened, tokens, workers, dtype, stop, observer, scratch, in_process)


def score_tokens(
    model: str,
    tokens: torch.Tensor,
    workers: Workers,
    dtype: torch.dtype | None,
    stop: threading.Event,
    observer: JobObserver,
    scratch: str | None,
    in_process: bool = False,
) -> dict[str, Any]:
    """The same of token ids (windows, window) that are known."""
    opened = open_scored(model, tokens.shape[1])
    return _score(opened, tokens, workers, dtype, stop, observer, scratch, in_process)


def open_scored(model: str, window: int, code: bool = False) -> tuple[SourceCheckpoint, Mapping[str, Any]]:
    """A checkpoint, dense or compressed, that takes windows of this length. Raises InputError.

    `code`: see `open_source`.
    """
    source, config = read_checkpoint(model, code)
    if config.get("model_type") == "lamina":
        source.require(expected_tensors(config))
    if window > config["max_position_embeddings"]:
        raise InputError(
            f"window: {window} is longer than the model's max_position_embeddings {config['max_position_embeddings']}"
        )
    return source, config


def _score(
    opened: tuple[SourceCheckpoint, Mapping[str, Any]],
    tokens: torch.Tensor,
    workers: Workers,
    dtype: torch.dtype | None,
    stop: threading.Event,
    observer: JobObserver,
    scratch: str | os.PathLike[str] | None,
    in_process: bool,
) -> dict[str, Any]:
    """`dtype`: of the forward pass; None: as stored. The log-softmax is float32 in any case."""
    source, config = opened
    geometry, window = geometry_of(config), tokens.shape[1]
    with tempfile.TemporaryDirectory(dir=scratch and os.path.abspath(scratch), prefix=SCRATCH_PREFIX) as directory:
        setup = WorkerConfig(
            source=source,
            config=config,
            geometry=geometry,
            run_dir=directory,
            tokens=None,
            shards=min(SHARDS, len(tokens)),
            micro_batch=max(1, NUMBERS_PER_BATCH // window),
            dtype=dtype or _stored_dtype(source, config),
            threads=workers.cpus,
            use_gpu=workers.gpus > 0,
            gpu_share=workers.gpus,
            hidden_bytes=int(workers.activation_memory_gb * 2**30),
            token_ids=tokens.to(torch.int32),  # through Ray: another node sees no folder of this one
        )
        windows = Windows.even(len(tokens), setup.shards, str(setup.dtype).removeprefix("torch."), setup.micro_batch)
        observer.stage("start")
        with worker_pool(setup, workers, stop, observer.say, in_process) as pool:
            found = score_windows(pool, windows, geometry.num_layers, observer)
    return perplexity_figures(found, len(tokens), window)


def perplexity_figures(found: Scored, windows: int, window: int) -> dict[str, Any]:
    """What was scored over so many windows, as JSON has it."""
    loss = found.loss / found.tokens
    figures = {"perplexity": json_perplexity(loss), "loss": loss}
    return {**figures, "tokens": found.tokens, "windows": windows, "window": window}


def _stored_dtype(source: SourceCheckpoint, config: Mapping[str, Any]) -> torch.dtype:
    named = config.get("dtype")  # of a compressed checkpoint; its bitmaps are bytes
    return getattr(torch, named) if named else layer_dtype(source, geometry_of(config))


def sweep_scratch(run_dir: Storage) -> None:
    """Removes what scoring left that was killed."""
    for folder in run_dir.folders():
        if folder.startswith(SCRATCH_PREFIX):
            run_dir.delete_folder(folder)


def score_windows(pool: Pool, windows: Windows, num_layers: int, observer: JobObserver) -> Scored:
    """Scores all windows through the layers that the workers read, and the head; added in shard order."""
    return Scheduler(pool, observer).run(_scored(windows, num_layers, observer))


def _scored(windows: Windows, num_layers: int, observer: JobObserver) -> TaskStream[Scored]:
    observer.phase("evaluate", num_layers, windows.shards)
    layers = (None,) * num_layers
    for layer in range(num_layers):
        yield window_units(windows, MODEL, layers, layer)
        observer.layer_done("evaluate", layer, {})
    scores = yield [Score(windows, MODEL, num_layers, shard, replay=layers) for shard in range(windows.shards)]
    return sum(scores, Scored(0.0, 0))
