"""Chooses the settings of a job: method and correction by its goal, samples, shards and workers by what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from manifests.engines import Engine
from manifests.fit import Fit
from pipeline.cost_model.estimate import Plan
from pipeline.recommendation.nodes import Node, worker_sizes
from pipeline.recommendation.recipes import Recipe
from pipeline.recommendation.text_use import TextUse, shortened

CORRECTED_UP_TO = 0.8  # of dense models; of mixtures below it (docs/results.md#corrections)
MICRO_BATCH_TOKENS = 2048
EIGHT_BITS_FROM = 0.6  # share of the bytes that leaves room for 8 bits and their scales
USUAL_SHARE = 0.8  # of the numbers, or of the bytes of a source in a stored format
LEAST_SHARDS, SHARDS_PER_WORKER = 16, 2
ACTIVATION_GB, LEAST_ACTIVATION_GB = 8.0, 1.0
SHORT = 512  # samples are not made shorter than this to save memory


@dataclass(frozen=True)
class Goal:
    """The size, the loss or the memory that a user requests.

    Attributes:
        value: of the manifest's field; of `fit`, the memory in bytes.
        unrounded: roles that keep their dtype where bits are chosen, because no group of scales fits their inputs.
        uncorrected: why the model's layers cannot be solved on outputs of compressed layers; empty if they can.
        engine: the engine that will load the output; None: any.
        mixture: some layers are mixtures of experts.
        widest: the most numbers that a matrix reads, for which corrections need tokens.
        fit: the memory, and what is served in it, for the field `fit`; `recipe`: the choice for it.
    """

    field: Literal["keep", "bytes", "max_loss", "fit"]
    value: float
    unrounded: tuple[str, ...] = ()
    uncorrected: str = ""
    engine: Engine | None = None
    mixture: bool = False
    widest: int = 0
    fit: Fit | None = None
    recipe: Recipe | None = None

    @property
    def label(self) -> str:
        """The goal in the name of a folder, such as keep-0.8."""
        if self.fit is not None:
            return f"fits-{self.fit.memory / 1e9:g}GB"
        return f"{self.field.replace('_', '-')}-{self.value:g}"

    @property
    def small(self) -> bool:
        """True if the loss at this size is large enough for corrections to pay."""
        if self.field != "keep":
            return self.field == "bytes"
        return self.value < CORRECTED_UP_TO or (self.value == CORRECTED_UP_TO and not self.mixture)

    @property
    def corrected(self) -> bool:
        """True if each layer should compensate the error of the layers before it."""
        return self.small and not self.uncorrected and self.engine != "llama.cpp"

    @property
    def bits(self) -> str:
        """The bits of rounded weights: any, or for an engine with kernels those that it has."""
        if self.engine not in ("vllm", "llama.cpp"):
            return "auto"
        return "8" if self.value >= EIGHT_BITS_FROM else "4"

    @property
    def levels(self) -> str:
        """The levels of codes: those of llama.cpp's kernels that lose least, elsewhere uniform ones."""
        return "iq4_nl" if (self.engine, self.bits) == ("llama.cpp", "4") else "uniform"


@dataclass(frozen=True)
class Settings:
    """The settings of a manifest that follow from the text and the machines."""

    text: TextUse
    shards: int
    micro_batch: int
    workers: int
    cpus: int
    gpus: int
    activation_gb: float


def choose_settings(text: TextUse, nodes: Sequence[Node], plan: Callable[[Settings], Plan]) -> Settings:
    """Return the first settings whose workers fit on every node.

    Tries fewer workers with more threads first, then less memory for hidden states, then shorter samples. If nothing
    fits, returns the settings that need least, so that the plan can say by how much they exceed the memory.

    Args:
        nodes: the machines, at least one.
        plan: predicts the memory of a job with these settings.
    """
    chosen = None
    for chosen in _candidates(text, nodes):
        worker_bytes = plan(chosen).worker_host_bytes
        rooms = [node.room(chosen.cpus, chosen.gpus, worker_bytes) for node in nodes]
        if all(rooms):
            return replace(chosen, workers=min(chosen.workers, sum(rooms)))
    assert chosen is not None
    return replace(chosen, workers=1)


def _candidates(text: TextUse, nodes: Sequence[Node]) -> Iterator[Settings]:
    sizes = worker_sizes(nodes)
    for cpus, gpus in sizes:
        yield _settings(text, nodes, cpus, gpus, ACTIVATION_GB)
    cpus, gpus = sizes[-1]
    use = text
    while True:
        yield _settings(use, nodes, cpus, gpus, LEAST_ACTIVATION_GB)
        if use.length // 2 < SHORT:
            return
        use = shortened(use, use.length // 2)


def _settings(text: TextUse, nodes: Sequence[Node], cpus: int, gpus: int, activation_gb: float) -> Settings:
    workers = max(1, sum(node.room(cpus, gpus, 0.0) for node in nodes))
    shards = min(text.samples, max(LEAST_SHARDS, SHARDS_PER_WORKER * workers))
    micro_batch = max(1, min(MICRO_BATCH_TOKENS // text.length, text.samples // shards))
    return Settings(text, shards, micro_batch, workers, cpus, gpus, activation_gb)
