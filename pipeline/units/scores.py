"""Units that score a model on windows of tokens, or compare it with the dense model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from manifests.records import ArrayRecord, StagedLayer
from pipeline.units.base import HandleResult, Replaying, WorkUnit, layer_part_name
from pipeline.units.sharding import shard_range

COMPARED_LAYERS = 4  # layers of both models in one `Compare`


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, cut into shards.

    Attributes:
        ranges: for each shard, its first window and one past its last.
        dtype: torch's name of the dtype of the forward pass.
        micro_batch: the number of windows that go through a layer at a time.
        tokens: record of the token ids (windows, length); None: the windows that the workers received when they
            started.
        prefix: the number of ids at the beginning of each window that the tokenizer puts before a text.
        models: the number of models that are scored on them side by side.
    """

    ranges: tuple[tuple[int, int], ...]
    dtype: str
    micro_batch: int
    tokens: ArrayRecord | None = None
    prefix: int = 0
    models: int = 1

    @classmethod
    def even(
        cls,
        windows: int,
        shards: int,
        dtype: str,
        micro_batch: int,
        tokens: ArrayRecord | None = None,
        prefix: int = 0,
        models: int = 1,
    ) -> Windows:
        """Cut windows into at most `shards` shards, as calibration samples are cut."""
        shards = min(shards, windows)
        ranges = tuple(shard_range(shard, shards, windows) for shard in range(shards))
        return cls(ranges, dtype, micro_batch, tokens, prefix, models)

    @property
    def unscored(self) -> int:
        """The number of tokens at the beginning of a window that are not scored: its prefix, or its first token."""
        return max(1, self.prefix)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.ranges)

    @property
    def name(self) -> str | None:
        """The path of the stored tokens, which names them in entries of the ledger."""
        return self.tokens.path if self.tokens else None


def scorers(shards: int, workers: int, models: int = 2) -> int:
    """The number of workers that score one model, while as many score each of the other `models`."""
    return min(shards, math.ceil(workers / models))


def shards_per_worker(shards: int, workers: int, models: int = 2) -> int:
    """The largest number of shards for one worker."""
    return math.ceil(shards / scorers(shards, workers, models))


@dataclass(frozen=True)
class WindowForward(Replaying):
    """Runs one shard of windows through one layer. The result is a `pipeline.units.units.ShardDone`.

    Attributes:
        model: the name of the model being scored, among all models on the same windows.
        staged, store, part, ahead: as in `pipeline.units.units.Forward`.
        ahead_staged: the layer to read ahead, if it is staged.
    """

    windows: Windows
    model: str
    layer: int
    shard: int
    staged: StagedLayer | None = None
    store: bool = False
    part: int | None = None
    ahead: int | None = None
    ahead_staged: StagedLayer | None = None

    @property
    def key(self) -> str:
        return f"windowforward/{self.model}/{layer_part_name(self.layer, self.part)}/{self.shard}"


@dataclass(frozen=True)
class Score(Replaying):
    """Scores one shard of windows with the head, after the last layer. The result is a `Scored`.

    `layer`: one past the last layer. `staged`: the last layer, which may hold the head. `dense`: record of the dense
    model's last outputs, from which the divergence is measured. The other fields are as in `WindowForward`.
    """

    windows: Windows
    model: str
    layer: int
    shard: int
    staged: StagedLayer | None = None
    dense: ArrayRecord | None = None

    @property
    def key(self) -> str:
        return f"score/{self.model}/{self.shard}"


@dataclass(frozen=True)
class Teach(Score):
    """Stores the model's distribution on one shard of windows, for a distillation loss.

    The result is the record of the rows (windows, scored tokens, bytes), see `pipeline.kernels.teacher_rows`. Fields as
    in `Score`.
    """

    @property
    def key(self) -> str:
        return f"teach/{self.model}/{self.shard}"


@dataclass(frozen=True)
class Scored:
    """Sums over `tokens`, in nats: negative log likelihood; with a dense model, also its own and Σ KL(dense‖model)."""

    loss: float
    tokens: int
    dense_loss: float = 0.0
    divergence: float = 0.0

    def __add__(self, other: Scored) -> Scored:
        """Add the sums of other tokens."""
        return Scored(
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.dense_loss + other.dense_loss,
            self.divergence + other.divergence,
        )


@dataclass(frozen=True)
class Compare(WorkUnit):
    """Runs some layers of the dense and of the staged model on a few tokens. The result is a `CompareDone`.

    Attributes:
        tokens: token ids of whole samples of one length.
        staged: the records of the compressed layers from `first` on; None: the layer is unchanged.
        before: handle of both models' inputs of layer `first`; None for the first layer of the model.
        head: also run the head, after the last layer.
    """

    tokens: tuple[tuple[int, ...], ...]
    staged: tuple[StagedLayer | None, ...]
    first: int = 0
    before: Any = None
    head: bool = True

    @property
    def key(self) -> str:
        return f"compare/{self.first}"

    @property
    def handles(self) -> int:
        return 1 - self.head


@dataclass(frozen=True)
class CompareDone(HandleResult):
    """Figures for `manifests.records.ComparedFigures`, and a handle of the outputs of the last of these layers."""

    handle_fields: ClassVar[tuple[str, ...]] = ("after",)

    figures: Mapping[str, Any]
    after: Any = None
