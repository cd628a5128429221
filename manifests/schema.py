"""The manifest: what a job reads, writes and computes. docs/manifest.md.

One pydantic model per block; unknown fields, wrong types and impossible values are refused, all of them at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

MANIFEST_VERSION = 1
RANKS_ONLY = re.compile(  # fields of `Manifest.semantic` that decide ranks, and nothing that is measured on text
    r"budget(\..*)?|methods\.\d+\.(keep|ranks|cache_keep|allocation|rank_multiple|skip_above)(\..*)?", re.ASCII
)
LAYERS_PATTERN = re.compile(r"all|last:(0*[1-9][0-9]*|0?\.[0-9]*[1-9][0-9]*|1\.0*)", re.ASCII)


def _without_control_characters(text: str) -> str:
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise ValueError("should be a path or an address: not blank, no control characters")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("should be a path or an address: half a surrogate pair is no character")
    return text


Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Location = Annotated[str, AfterValidator(_without_control_characters)]
Listed = Field(strict=False)  # YAML has lists only; strict tuples refuse them


class Block(BaseModel):
    """Base of every manifest block: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(Block):
    """Where the dense model is: a directory or a hub id; `revision` is the hub's.

    `trust_remote_code`: whether Python that a checkpoint brings (`auto_map`) may run, which only a tokenizer can need:
    models are always built by Lamina's own families. It travels with the tokenizer to the output.
    """

    source: Location
    revision: str | None = None
    trust_remote_code: bool = False


class Budget(Block):
    """`keep`: share of the stored numbers in `scope` that may remain, indices and second factors counted.

    Or `max_loss`: the smallest such share at which the compressed model is at most so far from the dense one, in nats
    per token (Kullback-Leibler), measured on calibration text beyond the samples. For methods with allocation: loss.
    """

    keep: Share | None = None
    max_loss: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    scope: Literal["decoder", "model"] = "decoder"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.keep is None) == (self.max_loss is None):
            raise ValueError("give either `keep` or `max_loss`, and not both")
        return self

    @property
    def share(self) -> float:
        """What may remain; all of it as long as `max_loss` has chosen no size."""
        return 1.0 if self.keep is None else self.keep


class Text(Block):
    """Text by `files` (.txt, .jsonl, .json, .parquet; `field` names the column) or by a `datasets` dataset."""

    files: Annotated[tuple[Location, ...], Listed] | None = None
    field: str | None = None
    dataset: str | None = None
    name: str | None = None
    split: str = "train"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.files) == bool(self.dataset):
            raise ValueError("give either `files` (a non-empty list) or `dataset`, and not both")
        return self


TEXT_TAGS = ("one text", "several texts")  # in pydantic's places of errors


class SharedText(Text):
    """One of several calibration texts, and the share of the samples that come from it."""

    share: Share


class Gradient(Block):
    """The backward pass, for methods that follow the loss: over how many of the calibration samples, and of what.

    `samples` null: as many as give 16 tokens for each number of the hidden size, and 16,384 at least; at most all.
    `kind: local` takes random gradients at each layer's own output instead of the model's; cheaper, and it predicts no
    loss in nats.
    """

    samples: PositiveInt | None = None
    kind: Literal["model", "local"] = "model"


class Calibration(Block):
    """The calibration text and how it is cut: `samples` of `sequence_length` tokens in `shards` fixed parts.

    `text` may be a list of texts with shares that add up to 1: a few percent of another domain keep most of it.
    """

    text: Annotated[
        Annotated[Text, Tag(TEXT_TAGS[0])] | Annotated[tuple[SharedText, ...], Listed, Tag(TEXT_TAGS[1])],
        Discriminator(lambda given: TEXT_TAGS[isinstance(given, list | tuple)]),
    ]
    samples: PositiveInt = 256
    sequence_length: Annotated[int, Field(ge=2)] = 2048
    shards: PositiveInt = 16
    micro_batch: PositiveInt = 1
    propagate: Literal["compressed", "dense"] = "dense"
    gradient: Gradient = Gradient()

    @property
    def texts(self) -> tuple[tuple[Text, int], ...]:
        """Every text, and how many samples are drawn from it: its share, rounded so that all of them are `samples`."""
        if isinstance(self.text, Text):
            return ((self.text, self.samples),)
        ends = [round(self.samples * sum(text.share for text in self.text[: end + 1])) for end in range(len(self.text))]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return tuple(zip(self.text, counts, strict=True))

    @model_validator(mode="after")
    def _texts_share_the_samples(self) -> Self:
        if isinstance(self.text, Text):
            return self
        total = sum(text.share for text in self.text)
        if not self.text or abs(total - 1.0) > 1e-6:
            raise ValueError(f"text: the shares of its {len(self.text)} texts add up to {total:g}, not to 1")
        for position, (_, count) in enumerate(self.texts):
            if count < 1:
                raise ValueError(f"text.{position}.share: leaves it without one of {self.samples} samples")
        return self

    @model_validator(mode="after")
    def _gradient_samples_are_among_the_samples(self) -> Self:
        if self.gradient.samples is not None and self.gradient.samples > self.samples:
            raise ValueError(f"gradient.samples: {self.gradient.samples} is more than samples: {self.samples}")
        return self

    @model_validator(mode="after")
    def _shards_have_samples(self) -> Self:
        if self.shards > self.samples:
            raise ValueError(f"shards: {self.shards} is more than samples: {self.samples}; every shard needs a sample")
        return self


class MethodEntry(Block):
    """What every method's entry may say: which layers, and a `keep` of its own instead of the common budget's.

    `layers`: `all`, `last:N`, `last:SHARE` (`last:0.5`: the deeper half) or a list of numbers from 0.
    """

    layers: str | tuple[int, ...] = "all"
    keep: Share | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether ranks or solutions follow what the model's loss feels."""
        return "loss" in (getattr(self, "allocation", None), getattr(self, "weighting", None))

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_known(cls, layers: Any) -> str | tuple[int, ...]:
        if isinstance(layers, str) and LAYERS_PATTERN.fullmatch(layers):
            return layers
        if isinstance(layers, (list, tuple)) and layers and all(type(n) is int and n >= 0 for n in layers):
            return tuple(layers)
        raise ValueError("should be all, last:N, last:SHARE (N and SHARE above 0) or a list of layer numbers from 0")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layer numbers meant, ascending, for a model of `num_layers`. Raises ValueError if one does not exist."""
        if self.layers == "all":
            return tuple(range(num_layers))
        if isinstance(self.layers, str):
            number = self.layers.removeprefix("last:")
            count = round(float(number) * num_layers) if "." in number else int(number)
            if not 1 <= count <= num_layers:
                raise ValueError(f"layers: {self.layers} asks for {count} of {num_layers} layers")
            return tuple(range(num_layers - count, num_layers))
        chosen = tuple(sorted(set(self.layers)))
        if chosen[-1] >= num_layers:
            raise ValueError(f"layers: {list(self.layers)}; the model has layers 0 to {num_layers - 1}")
        return chosen


class FlatLLMRanks(Block):
    """Ranks given outright, the same in every layer, instead of a budget."""

    value: PositiveInt | None = None
    mlp: PositiveInt | None = None
    query_key: PositiveInt | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and self.mlp is None and self.query_key is None:
            raise ValueError("should give at least one of value, mlp, query_key")
        return self


class FlatLLM(MethodEntry):
    """FLAT-LLM, docs/methods.md#flat-llm. Defaults are ours.

    The paper's are basis: value, weighting: none, selection: leverage.
    """

    method: Literal["flat_llm"]
    attention: bool = True
    mlp: bool = True
    allocation: Literal["importance", "uniform", "loss"] = "importance"
    basis: Literal["value", "context"] = "context"
    weighting: Literal["none", "output", "loss"] = "output"
    selection: Literal["leverage", "eliminate"] = "eliminate"
    query_key: Literal["none", "head_pca"] = "none"
    ridge: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    rank_multiple: PositiveInt = 1
    ranks: FlatLLMRanks | None = None

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.attention or self.mlp or self.query_key != "none"):
            raise ValueError("attention, mlp and query_key are all off: the method would claim nothing")
        if self.ranks is not None and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both")
        if self.allocation == "loss" and self.query_key != "none":
            raise ValueError("query_key: head_pca has no prediction of the loss; leave it out of allocation: loss")
        if self.allocation == "loss" and self.ranks is not None:
            raise ValueError("give `ranks` or allocation: loss, not both")
        return self


class LoRC(MethodEntry):
    """LoRC, docs/methods.md#lorc: the cache holds latents. `cache_keep`: the mean share of it; null: by the budget."""

    method: Literal["lorc"]
    key: bool = True
    value: bool = True
    cache_keep: Share | None = None
    allocation: Literal["progressive", "uniform", "loss"] = "uniform"
    weighting: Literal["none", "input", "loss"] = "none"
    skip_above: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _thresholds_mean_progressive(cls, entry: Any) -> Any:
        """`skip_above` compares condition numbers, as only progressive ranks do."""
        if isinstance(entry, Mapping) and entry.get("skip_above") is not None and "allocation" not in entry:
            return {**entry, "allocation": "progressive"}
        return entry

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.key or self.value):
            raise ValueError("key and value are both off: the method would claim nothing")
        if self.cache_keep is not None and self.keep is not None:
            raise ValueError("give `cache_keep` or `keep`, not both")
        if self.skip_above is not None and self.allocation != "progressive":
            raise ValueError("skip_above goes with allocation: progressive, which knows the condition numbers")
        return self


class JointRanks(Block):
    """Ranks given outright, the same in every chosen layer."""

    query_key: PositiveInt | None = None
    mlp: PositiveInt | None = None


class JointRankK(MethodEntry):
    """Joint rank-k, docs/methods.md#joint-rank-k. `mlp` true means joint."""

    method: Literal["joint_rank_k"]
    query_key: Literal["joint", "separate", "joint_per_head", "none"] = "joint"
    mlp: bool | Literal["joint", "separate", "none"] = True
    allocation: Literal["uniform", "loss"] = "uniform"
    weighting: Literal["none", "input", "loss"] = "none"
    ranks: JointRanks | None = None

    @property
    def mlp_form(self) -> str:
        """joint, separate or none."""
        return self.mlp if isinstance(self.mlp, str) else ("joint" if self.mlp else "none")

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if self.query_key == "none" and self.mlp_form == "none":
            raise ValueError("query_key and mlp are both off: the method would claim nothing")
        if self.ranks is not None and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both")
        if self.ranks is not None:
            wanted = {"query_key": self.query_key != "none", "mlp": self.mlp_form != "none"}
            missing = [name for name, claimed in wanted.items() if claimed and getattr(self.ranks, name) is None]
            if missing:
                raise ValueError(f"ranks: {', '.join(missing)} missing, although it is claimed")
        if self.ranks is not None and self.allocation == "loss":
            raise ValueError("give `ranks` or allocation: loss, not both")
        if self.query_key == "joint_per_head" and self.needs_gradient:
            raise ValueError("query_key: joint_per_head has no prediction of the loss; use joint or separate")
        return self


class LeSTD(MethodEntry):
    """LeSTD, docs/methods.md#lestd: shared-subspace Tucker with a sparse core. `ranks` [R1, R2, R3]; null: searched.

    `prune` false keeps the core dense. `refine_sweeps` turn the factors to fit the sparse core, which is beyond the
    paper (0: its algorithm). `threshold: model` cuts all layers' cores at one magnitude. `core`: in memory, served.
    """

    method: Literal["lestd"]
    target: Literal["attention", "mlp", "both"] = "attention"
    ranks: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt] | None, Listed] = None
    prune: bool = True
    weighting: Literal["none", "input"] = "none"
    sweeps: PositiveInt = 10
    tolerance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-6
    allocation: Literal["uniform", "loss"] = "uniform"
    threshold: Literal["layer", "model"] = "layer"
    refine_sweeps: Annotated[int, Field(ge=0)] = 10
    core: Literal["dense", "csr"] = "dense"

    @property
    def fixed(self) -> bool:
        """Whether the ranks alone say what is stored."""
        return self.ranks is not None and not self.prune

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.fixed and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both: a core that is not pruned has the size of its ranks")
        if self.ranks is not None and self.target == "both":
            raise ValueError(
                "ranks: attention (d wide) and MLP (as wide as its inner layer) need ranks of their own; "
                "give two entries, with target: attention and target: mlp"
            )
        if self.weighting == "input" and self.target != "attention":
            raise ValueError(
                "weighting: input goes with target: attention, where q, k and v read the same input; in the MLP's "
                "tensor down reads another input than its neighbours"
            )
        if self.threshold == "model" and self.weighting == "input":
            raise ValueError(
                "threshold: model compares cores of all layers before calibration text has passed any of them, so it "
                "does not go with weighting: input; use threshold: layer"
            )
        if self.allocation == "loss" and (self.threshold == "model" or self.fixed):
            raise ValueError(
                "allocation: loss gives each layer a size of its own; leave out threshold: model, and fixed `ranks`"
            )
        if self.threshold == "model" and not self.prune:
            raise ValueError("threshold: model goes with prune: true; a dense core is cut at no threshold")
        return self


class LossAware(MethodEntry):
    """Ranks, metrics and forms by what the loss feels, docs/methods.md#loss-aware. Ranks follow predicted loss, always.

    `correct: output` solves a layer behind the compressed ones, against what the dense model has more at that place.

    `weighting: input` solves without the gradient; the ranks still follow it. `widths`: how many widths of an MLP are
    compared. `factors: plain` stores two factors where `pivoted` stores rows of the matrix and what makes the others.
    """

    method: Literal["loss_aware"]
    query_key: bool = True
    attention: bool = True
    mlp: bool = True
    factors: Literal["pivoted", "plain"] = "pivoted"
    correct: Literal["none", "output"] = "none"
    weighting: Literal["loss", "input"] = "loss"
    widths: PositiveInt = 8
    rank_multiple: PositiveInt = 1

    @property
    def needs_gradient(self) -> bool:
        """Always."""
        return True

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.query_key or self.attention or self.mlp):
            raise ValueError("query_key, attention and mlp are all off: the method would claim nothing")
        return self


class Workers(Block):
    """How many actors, and what each takes. None of it changes a result except `cpus` (threads of a worker).

    `max_failures`: the job ends when this many workers in a row have died on the same unit, or while starting.
    `start_timeout_s`: how long the job waits where no node has what a worker asks for and no autoscaler adds nodes, or
    where other processes hold a node's memory.
    """

    min: Annotated[PositiveInt, Field(le=100_000)] = 1
    max: Annotated[PositiveInt, Field(le=100_000)] = 1
    cpus: Annotated[PositiveInt, Field(le=4096)] = 1
    gpus: Annotated[float, Field(ge=0.0, le=1024.0, allow_inf_nan=False)] = 0
    max_failures: PositiveInt = 3
    start_timeout_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 600.0
    activation_memory_gb: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 8.0

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        if self.gpus > 1:
            raise ValueError(f"gpus: {self.gpus}; a worker computes on one GPU: give 1 or a share, and more workers")
        return self


class Resume(Block):
    """Hidden states are committed every `every` layers; a crash costs at most the layers since."""

    every: PositiveInt = 1


class Statistics(Block):
    """Whether statistics outlive their layer; null: yes with propagate: dense, no with compressed."""

    keep: bool | None = None


class Perplexity(Block):
    """Perplexity of the committed output on `text`, windows of `window` tokens; `dense`: of the source besides."""

    text: Text
    window: Annotated[int, Field(ge=2)] = 2048
    dense: bool = False


class Evaluation(Block):
    """What is measured on the committed output."""

    perplexity: Perplexity | None = None
    tasks: Annotated[tuple[str, ...], Listed] = ()


AnyMethod = Annotated[FlatLLM | LoRC | JointRankK | LeSTD | LossAware, Field(discriminator="method")]


class Manifest(Block):
    """The whole job. Only `model`, `output`, `run_dir` and `methods` are always needed."""

    version: int
    model: Model
    output: Location
    run_dir: Location
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    budget: Budget | None = None
    calibration: Calibration | None = None
    methods: Annotated[tuple[AnyMethod, ...], Listed]
    workers: Workers = Workers()
    resume: Resume = Resume()
    statistics: Statistics = Statistics()
    evaluation: Evaluation = Evaluation()
    environment: Annotated[tuple[str, ...], Listed] = ()

    @field_validator("version")
    @classmethod
    def _version_is_ours(cls, version: int) -> int:
        if version != MANIFEST_VERSION:
            raise ValueError(f"this code reads manifests of version {MANIFEST_VERSION}, and no older or newer ones")
        return version

    @field_validator("methods")
    @classmethod
    def _has_a_method(cls, methods: tuple[AnyMethod, ...]) -> tuple[AnyMethod, ...]:
        # Not min_length: it counts the entries that are right, and so reports a wrong entry twice.
        if not methods:
            raise ValueError("should list at least one method")
        return methods

    @model_validator(mode="after")
    def _gradient_has_its_text(self) -> Self:
        for position, entry in enumerate(self.methods):
            where = f"methods.{position} ({entry.method})"
            if entry.needs_gradient and self.calibration is None:
                raise ValueError(f"{where} follows the model's loss on text, so that calibration is needed")
            if entry.needs_gradient and self.calibration and self.calibration.propagate != "dense":
                raise ValueError(
                    f"{where} follows statistics of the dense model; set calibration.propagate: dense, "
                    f"not {self.calibration.propagate}"
                )
        return self

    def semantic(self) -> dict[str, Any]:
        """The fields that change the output's bytes: what the fingerprint covers.

        Paths and evaluation do not; the calibration text is covered by its token ids, so a moved file changes nothing.
        """
        kept = self.model_dump(
            mode="json",
            include={"version", "seed", "budget", "calibration", "methods"},
            exclude={"calibration": {"text"}},
        )
        kept["workers"] = {"cpus": self.workers.cpus}
        return kept


def completed(semantic: Any) -> Any:
    """`Manifest.semantic` as an older version wrote it, with the fields that it did not know yet at their defaults.

    What no version of the schema can have written comes back as it is.
    """
    if not isinstance(semantic, Mapping):
        return semantic
    somewhere: dict[str, Any] = {"model": {"source": "-"}, "output": "-", "run_dir": "-"}
    fields = {**semantic, **somewhere}
    if isinstance(calibration := fields.get("calibration"), Mapping):
        fields["calibration"] = {**calibration, "text": {"files": ["-"]}}
    try:
        return Manifest.model_validate_json(json.dumps(fields)).semantic()
    except ValueError:
        return semantic
