"""The manifest: what a job reads, writes and computes. docs/manifest.md.

One pydantic model per block, those of the methods in `manifests.methods`. Unknown fields, wrong types and impossible
values are refused, all of them at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, ValidationInfo, field_validator, model_validator

from manifests.blocks import Block, Listed, Location, Share
from manifests.methods import AnyMethod
from manifests.quantize import Quantize

MANIFEST_VERSION = 1
RANKS_ONLY = re.compile(  # fields of `Manifest.semantic` that decide ranks and bits, and nothing measured on text
    r"budget(\..*)?|quantize\.(bits|group)|"
    r"methods\.\d+\.(keep|ranks|cache_keep|allocation|rank_multiple|skip_above)(\..*)?",
    re.ASCII,
)


class Model(Block):
    """Where the dense model is: a directory or a hub id; `revision` is the hub's.

    `trust_remote_code`: whether Python that a checkpoint brings (`auto_map`) may run, which only a tokenizer can need:
    models are always built by Lamina's own families. It travels to the output, and with it all files beside the
    weights that are neither weights nor a card, as it might read any of them.
    """

    source: Location
    revision: str | None = None
    trust_remote_code: bool = False


class Budget(Block):
    """`keep`: share of the stored numbers in `scope` that may remain, indices and second factors counted.

    Or `bytes`: share of the bytes, with codes and scales where `quantize` asks for fewer bits (`keep` counts numbers
    before they are rounded).

    Or `max_loss`: the smallest such share, to within 0.005, at which the compressed model is at most so far from the
    dense one, in nats per token (Kullback-Leibler), measured on calibration text beyond the samples. For methods with
    allocation: loss.

    What entries with a size of their own store (`keep`, `ranks`, `cache_keep`) counts within `keep` and `bytes`.

    `multiple`: the ranks and widths that a budget chooses are multiples of it, or whole; null: 16, and 1 below a hidden
    size of 1024. Tensor parallelism over n devices wants multiples of n, quantised caches of their group, often 64.
    """

    keep: Share | None = None
    bytes: Share | None = None
    max_loss: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    scope: Literal["decoder", "model"] = "decoder"
    multiple: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = [name for name in ("keep", "bytes", "max_loss") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give either `keep`, `bytes` or `max_loss`, and not {' and '.join(given)}")
        if not given and self.multiple is None:
            raise ValueError(
                "give either `keep`, `bytes` or `max_loss`; or `multiple` alone, beside entries with a size of their "
                "own"
            )
        return self

    @property
    def share(self) -> float:
        """What may remain, of numbers or of bytes; all of it as long as `max_loss` has chosen no size."""
        return self.keep or self.bytes or 1.0


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


class Workers(Block):
    """How many actors, and what each takes. None of it changes a result except `cpus` (threads of a worker).

    `max_failures`: the job ends when this many workers in a row have died on the same unit, or while starting.
    `start_timeout_s`: how long the job waits where no node has what a worker asks for and no autoscaler adds nodes, or
    where other processes hold a node's memory.
    `cache_gb`: of each node's local disk (TMPDIR), which its workers fill with tensors of a source in a bucket, each
    fetched once for all of them and all passes.
    With `--in-process` the command itself is the one worker, and Ray is not started: `max` is 1 then.
    """

    min: Annotated[PositiveInt, Field(le=100_000)] = 1
    max: Annotated[PositiveInt, Field(le=100_000)] = 1
    cpus: Annotated[PositiveInt, Field(le=4096)] = 1
    gpus: Annotated[float, Field(ge=0.0, le=1024.0, allow_inf_nan=False)] = 0
    max_failures: PositiveInt = 3
    start_timeout_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 600.0
    activation_memory_gb: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 8.0
    cache_gb: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        if self.gpus > 1:
            raise ValueError(f"gpus: {self.gpus}; a worker computes on one GPU: give 1 or a share, and more workers")
        return self


class Resume(Block):
    """Hidden states are committed every `every` layers; a crash costs at most the layers since.

    With `statistics: {keep: false}`, where layers are solved in the dense pass (docs/architecture.md), a crash costs
    those that are not written yet, too, up to three for each worker; commits are as far apart, at multiples of `every`.

    `auto`: as many as the plan takes for writing them in 5 % of the time or less, but no more than ten minutes of work;
    chosen when a run directory's work begins, and kept there. docs/plan.md#commits.
    """

    every: Annotated[int, Field(ge=1)] | Literal["auto"] = 1

    @field_validator("every", mode="before")
    @classmethod
    def _is_a_number_or_auto(cls, every: Any) -> Any:
        # A union would report each of its kinds as a fault.
        if every == "auto" or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
            return every
        raise ValueError("should be an integer greater than 0, or auto")


class Statistics(Block):
    """Whether statistics outlive their layer; null: yes with propagate: dense, no with compressed."""

    keep: bool | None = None


class Perplexity(Block):
    """Perplexity of the committed output on `text`, windows of `window` tokens; `dense`: of the source besides."""

    text: Text
    window: Annotated[int, Field(ge=2)] = 2048
    dense: bool = False


class Evaluation(Block):
    """What is measured on the committed output.

    `tasks`: names of lm-eval's tasks, or YAML files of one task each; of the dense model, too. Each model is loaded
    whole by the process that runs the job.
    """

    perplexity: Perplexity | None = None
    tasks: Annotated[tuple[str, ...], Listed] = ()


class Manifest(Block):
    """The whole job. Only `model`, `output`, `run_dir` and `methods` are always needed."""

    version: int
    model: Model
    output: Location
    run_dir: Location
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    budget: Budget | None = None
    calibration: Calibration | None = None
    quantize: Quantize | None = None
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
    def _has_a_method(cls, methods: tuple[AnyMethod, ...], info: ValidationInfo) -> tuple[AnyMethod, ...]:
        # Not min_length: it counts the entries that are right, and so reports a wrong entry twice.
        if not methods and info.data.get("quantize", "wrong") is None:
            raise ValueError("should list at least one method; or none, beside `quantize`")
        return methods

    @model_validator(mode="after")
    def _rounding_has_its_text(self) -> Self:
        if self.quantize is not None and self.quantize.feedback and self.calibration is None:
            raise ValueError(
                "quantize.feedback: true needs calibration, whose text says what the weights read; leave it out to "
                "round to nearest"
            )
        return self

    @model_validator(mode="after")
    def _bytes_are_countable(self) -> Self:
        if self.budget is not None and self.budget.bytes and self.quantize is not None and self.quantize.group is None:
            raise ValueError("budget.bytes counts a scale for each group; give quantize.group, or budget.keep")
        return self

    @model_validator(mode="after")
    def _chosen_bits_have_a_budget(self) -> Self:
        if self.quantize is None or self.quantize.bits != "auto":
            return self
        if self.budget is None or self.budget.bytes is None:
            raise ValueError("quantize.bits: auto chooses within a size; give budget.bytes")
        if self.calibration is None or self.calibration.propagate != "dense":
            raise ValueError("quantize.bits: auto follows predicted loss; give calibration with propagate: dense")
        for position, entry in enumerate(self.methods):
            if not entry.follows_curves or entry.keep is not None:
                raise ValueError(
                    f"quantize.bits: auto chooses bits and ranks together; methods.{position} ({entry.method}) needs "
                    "allocation: loss, and no `keep` of its own"
                )
        return self

    @model_validator(mode="after")
    def _a_size_has_its_methods(self) -> Self:
        if not self.methods and self.budget is not None and self.budget.keep not in (None, 1.0):
            raise ValueError(
                "budget.keep counts numbers, and methods: [] leaves out none; leave it out, or give budget.bytes"
            )
        return self

    @property
    def rank_multiple(self) -> int | None:
        """What ranks are multiples of unless an entry says so itself: of the budget's `multiple` and of the groups."""
        multiple, group = self.budget.multiple if self.budget else None, self.quantize.group if self.quantize else None
        return math.lcm(multiple or 1, group or 1) if multiple or group else None

    @property
    def rounds_by_feedback(self) -> bool:
        """Whether what is stored is rounded by what it reads on calibration text."""
        return self.quantize is not None and self.calibration is not None and self.quantize.feedback is not False

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
            include={"version", "seed", "budget", "calibration", "methods", "quantize"},
            exclude={"calibration": {"text"}},
        )
        kept["workers"] = {"cpus": self.workers.cpus}
        return kept


def completed(semantic: Any) -> Any:
    """`Manifest.semantic` as an older version wrote it, with the fields that it did not know yet at their defaults, and
    ranks as multiples of 1, which they all were.

    What no version of the schema can have written comes back as it is.
    """
    if not isinstance(semantic, Mapping):
        return semantic
    somewhere: dict[str, Any] = {"model": {"source": "-"}, "output": "-", "run_dir": "-"}
    fields = {**semantic, **somewhere}
    if isinstance(calibration := fields.get("calibration"), Mapping):
        fields["calibration"] = {**calibration, "text": {"files": ["-"]}}
    try:
        known = Manifest.model_validate_json(json.dumps(fields)).semantic()
    except ValueError:
        return semantic
    return {**known, "methods": [{**entry, "rank_multiple": entry["rank_multiple"] or 1} for entry in known["methods"]]}
