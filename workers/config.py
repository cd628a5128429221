"""The configuration of a worker: locations of its data, and the split of samples into shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from manifests.records import ArrayRecord
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.methods.text_sources import NO_SOURCES, TextSources
from pipeline.units.sharding import gradient_count, shard_range
from stores.source import SourceCheckpoint
from stores.storage import Place

FORWARD_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that all workers of a job share; picklable.

    Attributes:
        config: standard config (families/registry.py) of the source: all forms dense, or a Lamina checkpoint's.
        tokens: record of token ids (samples, sequence) in the activation store; None for data-free jobs.
        shards: number of shards of the samples.
        dtype: dtype of the forward pass.
        manifest: the job's manifest; None for evaluation.
        points: manifests of a sweep's points; a task's `method` is an index into the methods of all of them.
        gradient_samples: number of samples of the backward pass, spread over the shards.
        prefix: number of ids at the beginning of each sample that the tokenizer puts before a text.
        run_dir: the place of activations.zarr, statistics.zarr and staged/.
        token_ids: windows to score (windows, length) that are not stored.
        gpu_share: each worker's share of a GPU, which limits its allocator.
        memory_bytes: planned host memory, which Ray reserves; 0: unknown.
        device_bytes: planned device memory; free memory beyond it holds hidden states. 0: unknown.
        experts: the number of a layer's experts that a worker holds at a time.
        hardware: hardware on which the job began (workers/hardware.py); None: the first worker's.
        sources: the sources of the calibration samples.
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
    prefix: int = 0
    gpu_share: float = 0.0
    memory_bytes: int = 0
    device_bytes: int = 0
    experts: int = 8
    hardware: Mapping[str, str] | None = None
    sources: TextSources = NO_SOURCES

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Return (samples, sequence); (0, 0) for data-free jobs."""
        samples, sequence = self.tokens.shape if self.tokens else (0, 0)
        return samples, sequence

    @property
    def sequence(self) -> int:
        """Return the tokens of a calibration sample."""
        return self.tokens_shape[1]

    @property
    def calibration_tokens(self) -> int:
        """Return the number of all calibration tokens."""
        return math.prod(self.tokens_shape)

    @property
    def gradient_tokens(self) -> int:
        """Return the number of tokens in the backward pass."""
        return self.gradient_samples * self.sequence

    def shard_shape(self, shard: int) -> tuple[int, int, int]:
        """Return the shape (M, S, D) of a shard's hidden states."""
        return self.samples_of(shard), self.sequence, self.geometry.hidden

    def sample_range(self, shard: int) -> tuple[int, int]:
        """Return (first, end) of a shard among all calibration samples."""
        return shard_range(shard, self.shards, self.tokens_shape[0])

    def samples_of(self, shard: int) -> int:
        """Return the number of calibration samples in a shard."""
        first, end = self.sample_range(shard)
        return end - first

    def micro_batches(self, shard: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each micro-batch within the shard."""
        samples = self.samples_of(shard)
        return [(start, min(start + self.micro_batch, samples)) for start in range(0, samples, self.micro_batch)]

    def gradient_count(self, shard: int) -> int:
        """Return how many of a shard's first samples are in the backward pass."""
        return gradient_count(shard, self.shards, self.tokens_shape[0], self.gradient_samples)
