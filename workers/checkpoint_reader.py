"""Reads the layers of a checkpoint outside of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.families.registry import geometry_of
from stores.source import SourceCheckpoint
from workers.config import WorkerConfig
from workers.layers import LayerReader


def cpu_reader(
    source: SourceCheckpoint, config: Mapping[str, Any], dtype: torch.dtype, whole: bool = False
) -> LayerReader:
    """Return a reader of a checkpoint, dense or compressed, whose blocks are in `dtype` on this process's CPU.

    `config`: of the checkpoint, under standard names (`pipeline.families.registry.standard_config`) or Lamina's own.
    `whole`: blocks hold all experts of a layer, not a slice.
    """
    setup = WorkerConfig(
        source=source,
        config=config,
        geometry=geometry_of(config),
        run_dir=source.storage,
        tokens=None,
        shards=1,
        micro_batch=1,
        dtype=dtype,
        threads=torch.get_num_threads(),
        use_gpu=False,
        hidden_bytes=0,
        experts=sys.maxsize if whole else WorkerConfig.experts,
    )
    return LayerReader(setup, torch.device("cpu"))
