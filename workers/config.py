"""What a worker is told when it starts: where everything is, and how the samples are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from manifests.records import ArrayRecord
from manifests.schema import Manifest
from pipeline.families.family import Geometry
from pipeline.units.sharding import gradient_count, shard_range
from stores.source import SourceCheckpoint
from stores.storage import Place

FORWARD_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class WorkerConfig:
    """One value for every worker of a job; picklable.

    Attributes:
        config: the standard config (families/registry.py) of the source: all forms dense, or a Lamina checkpoint's.
        tokens: record of the token ids (samples, sequence) in the activation store; None for data-free jobs.
        shards: how many parts the samples are cut in.
        dtype: of the forward pass.
        manifest: None when nothing is compressed (evaluation).
        points: of a sweep, the manifests of its points: a task's `method` counts through the methods of all of them.
        gradient_samples: how many of the samples the backward pass takes, spread over the shards.
        run_dir: holds activations.zarr, statistics.zarr and staged/.
        token_ids: of windows to score (windows, length) that are in no store: they travel with this value.
        gpu_share: of the GPU that a worker computes on; its allocator takes no more than that of the memory.
        memory_bytes: of host memory, as the plan expects; 0: unknown. Ray places workers where so much is free.
        device_bytes: of the device's memory, as the plan expects; what is free beyond holds hidden states. 0: unknown.
        hardware: what the job's workers compute on (workers/hardware.py); None: the first worker says.
    """

    source: SourceCheckpoint
    config: Mapping[str, Any]
    geometry: Geometry
    run_dir: Place
    tokens: ArrayRecord | None
    shards: int
    micro_batch: int
    dtype: torch.dtype
    threads: int
    use_gpu: bool
    hidden_bytes: int
    manifest: Manifest | None = None
    points: tuple[Manifest, ...] = ()
    token_ids: torch.Tensor | None = None
    gradient_samples: int = 0
    gpu_share: float = 0.0
    memory_bytes: int = 0
    device_bytes: int = 0
    hardware: Mapping[str, str] | None = None

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """(samples, sequence); (0, 0) for data-free jobs."""
        samples, sequence = self.tokens.shape if self.tokens else (0, 0)
        return samples, sequence

    def sample_range(self, shard: int) -> tuple[int, int]:
        """Which of all calibration samples a shard is; see `pipeline.units.sharding.shard_range`."""
        return shard_range(shard, self.shards, self.tokens_shape[0])

    def samples_of(self, shard: int) -> int:
        """How many calibration samples a shard has."""
        first, end = self.sample_range(shard)
        return end - first

    def micro_batches(self, shard: int) -> list[tuple[int, int]]:
        """(start, stop) of samples within the shard."""
        samples = self.samples_of(shard)
        return [(start, min(start + self.micro_batch, samples)) for start in range(0, samples, self.micro_batch)]

    def gradient_count(self, shard: int) -> int:
        """How many samples of a shard, its first ones, go through the backward pass."""
        return gradient_count(shard, self.shards, self.tokens_shape[0], self.gradient_samples)
