"""Checkpoints of a training in RUN_DIR, by torch.distributed.checkpoint: read again by any number of processes.

RUN_DIR/healing/step-000120.<generation>/
"""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from manifests.errors import CorruptError, StorageError, reason
from pipeline.healing.processes import Processes

FOLDER = "healing"
METADATA = ".metadata"  # written last by torch


def save_state(run_dir: Path, step: int, state: Mapping[str, Tensor], processes: Processes) -> str:
    """Write a checkpoint durably, each process its part. Return its folder, relative to RUN_DIR. Raises
    StorageError."""
    folder = processes.first(f"{FOLDER}/step-{step:06d}.{uuid.uuid4().hex}")
    try:
        with _alone():
            save(dict(state), checkpoint_id=run_dir / folder)
        for path in (run_dir / folder, run_dir / FOLDER, run_dir):
            _sync(path)
    except OSError as error:
        shutil.rmtree(run_dir / folder, ignore_errors=True)
        raise StorageError(
            f"{run_dir / folder}: the checkpoint of a healing cannot be written ({reason(error)}); free some room, "
            "then run the same command again"
        ) from error
    return folder


def load_state(run_dir: Path, folder: str, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state` from a checkpoint. Raises CorruptError if it is missing or damaged."""
    try:
        if not (run_dir / folder / METADATA).is_file():  # torch would log a traceback
            raise FileNotFoundError(f"{METADATA} is missing")
        with _alone():
            load(state, checkpoint_id=run_dir / folder)
    except Exception as error:  # torch raises many types about damaged files
        raise CorruptError(f"{run_dir / folder}: the checkpoint of a healing is damaged ({reason(error)})") from error


def sweep_states(run_dir: Path, live: str | None) -> None:
    """Remove all checkpoints but one."""
    for folder in (run_dir / FOLDER).glob("step-*"):
        if live is None or folder != run_dir / live:
            shutil.rmtree(folder, ignore_errors=True)
    if live is None:
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Ignore torch's warning that one process alone saves or loads, and raise the first process's error as it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
