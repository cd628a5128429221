"""Calibration of a manifest: texts, the number and length of samples, the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from manifests.blocks import Count, Listed, Location, ManifestBlock, Share

Prefix = Literal["tokenizer", "none"]  # what a window begins with: what the tokenizer puts before a text, or nothing
PARTS = 4  # `samples: auto` chooses a quarter, a half or all
FIELD_TAGS = ("one field", "several fields")  # parts of pydantic's error locations
NOT_OF_TEMPLATES = (  # arguments of `apply_chat_template` that templates do not receive
    "conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "add_generation_prompt",
    "continue_final_message", "messages",
)  # fmt: skip


class Text(ManifestBlock):
    """Text from `files` (.txt, .jsonl, .json, .parquet; all but the last also as .gz or .zst) or from a `datasets`
    dataset.

    `field`: the column with the text, `text` by default. The texts of several columns are joined, with a line break
    between two that have no white space there.

    `messages`: the column with conversations, which the model's own chat template writes as text. Rows without the
    field `text` need no name if a single field holds conversations. `tools`: the column with their tools, `tools` by
    default. `template`: arguments of the template, such as `{enable_thinking: false}`. docs/running-jobs.md#texts.

    Rows whose text is null or missing, and damaged conversations, are left out and counted, but at most 5 % of a file's
    rows. Empty texts are documents.

    `dataset`, `name`, `split`: of the hub, as `datasets.load_dataset` takes them.

    `begin`, `end`: only the text between these shares of each file, so that calibration and evaluation can use
    different parts of one file. In .gz and .zst files they are shares of the unpacked length, which is counted first.
    """

    files: Annotated[tuple[Location, ...], Listed] | None = None
    field: (
        Annotated[
            Annotated[str, Tag(FIELD_TAGS[0])] | Annotated[tuple[str, ...], Listed, Tag(FIELD_TAGS[1])],
            Discriminator(lambda field: FIELD_TAGS[isinstance(field, list | tuple)]),
        ]
        | None
    ) = None
    messages: str | None = None
    tools: str | None = None
    template: Mapping[str, Any] | None = None
    dataset: str | None = None
    name: str | None = None
    split: str = "train"
    begin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    end: Share = 1.0

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.files) == bool(self.dataset):
            raise ValueError("give either `files` (a non-empty list) or `dataset`, and not both")
        if self.begin >= self.end:
            raise ValueError(f"begin: {self.begin:g} is not below end: {self.end:g}")
        if self.dataset and (self.begin, self.end) != (0.0, 1.0):
            raise ValueError("begin and end cut `files`; for a dataset, give another `split`")
        return self

    @model_validator(mode="after")
    def _texts_or_conversations(self) -> Self:
        if self.field is not None and self.has_conversations:
            raise ValueError("field is for texts; messages, tools and template are for conversations; give either")
        if self.field is not None and (not self.fields or len({*self.fields}) < len(self.fields)):
            raise ValueError(f"field: {list(self.fields)} should be different names, at least one")
        if fixed := [name for name in self.template or {} if name in NOT_OF_TEMPLATES]:
            raise ValueError(f"template.{fixed[0]}: is not an argument of a chat template; leave it out")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The named columns of text; empty: the default."""
        return (self.field,) if isinstance(self.field, str) else self.field or ()

    @property
    def has_conversations(self) -> bool:
        """True if a field is given that only conversations have."""
        return self.messages is not None or self.tools is not None or self.template is not None

    @property
    def sources(self) -> dict[str, Text]:
        """Map the names of the sources, each file or the dataset, to the text of each alone."""
        if self.dataset:
            return {" ".join(filter(None, (self.dataset, self.name, self.split))): self}
        return {file: self.model_copy(update={"files": (file,)}) for file in self.files or ()}


SHARDS = 16
FORMER_LEAST_TOKENS = 16_384  # of jobs begun before `gradient.least_tokens` was a field
TEXT_TAGS = ("one text", "several texts")  # parts of pydantic's error locations


class SharedText(Text):
    """One of several calibration texts, and the share of the samples that come from it."""

    share: Share


class Gradient(ManifestBlock):
    """The backward pass, for methods that follow the loss.

    `samples`: the number of calibration samples in it; null: enough for 16 tokens per number of the hidden size and for
    `least_tokens`, at most all. `kind: local` uses random gradients at each layer's own output instead of those of
    the model's loss. That is cheaper, but predicts no loss in nats.
    """

    samples: Count | None = None
    least_tokens: Count = 65_536
    kind: Literal["model", "local"] = "model"


class Calibration(ManifestBlock):
    """The calibration text: `samples` of `sequence_length` tokens, in `shards` fixed parts.

    `samples: auto` chooses a quarter, a half or all of `max_samples`, when work in a run directory begins: the fewest
    from which statistics describe other text as well as all of them do, to 1 % (docs/methods.md#the-amount-of-text).
    It stays below `max_minutes` of planned time, if a quarter does. The choice is kept in the run directory.

    `prefix`: every sample begins with the ids that the tokenizer puts before a text, such as a BOS; they count in its
    length. `none`: it begins with the text itself.

    `shards`: workers pass one shard at a time, so that there should be a few for each worker. With fewer than 16
    samples (`samples: auto`: if a quarter of the most is fewer), the default is one shard for each. `micro_batch`:
    samples computed at once. `propagate`: statistics of a layer are those of the dense model, from one pass for all
    layers, or those behind the compressed layers before it.

    `text` may be a list of texts with shares that add up to 1. A few percent of text of another domain preserve most of
    the model's quality there.
    """

    text: Annotated[
        Annotated[Text, Tag(TEXT_TAGS[0])] | Annotated[tuple[SharedText, ...], Listed, Tag(TEXT_TAGS[1])],
        Discriminator(lambda text: TEXT_TAGS[isinstance(text, list | tuple)]),
    ]
    samples: Count = 256
    max_samples: Count | None = None
    max_minutes: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    sequence_length: Annotated[int, Field(ge=2, le=10**9)] = 2048
    prefix: Prefix = "tokenizer"
    shards: Count = SHARDS
    micro_batch: Count = 1
    propagate: Literal["compressed", "dense"] = "dense"
    gradient: Gradient = Gradient()

    @model_validator(mode="before")
    @classmethod
    def _auto_begins_with_the_most(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        completed, fewest = {**fields}, fields.get("samples")
        if fewest == "auto":
            if fields.get("max_samples") is None:
                raise ValueError("samples: auto chooses among at most max_samples; give max_samples")
            completed["samples"] = fewest = fields["max_samples"]
            fewest = max(1, fewest // PARTS) if type(fewest) is int else fewest
        if type(fewest) is int and 1 <= fewest < SHARDS:
            completed.setdefault("shards", fewest)
        return completed

    @model_validator(mode="after")
    def _auto_has_parts(self) -> Self:
        if self.max_samples is None:
            if self.max_minutes is not None:
                raise ValueError("max_minutes: limits samples: auto; give samples: auto and max_samples")
            return self
        if self.samples > self.max_samples:
            raise ValueError(f"samples: {self.samples} is more than max_samples: {self.max_samples}")
        if self.max_samples // PARTS < max(2, self.shards):
            raise ValueError(
                f"max_samples: a quarter of {self.max_samples} leaves {self.shards} shards without a sample each; "
                "raise max_samples, or lower shards"
            )
        return self

    @property
    def chooses_samples(self) -> bool:
        """True for `samples: auto`, until the number is chosen."""
        return self.max_samples == self.samples

    @property
    def texts(self) -> tuple[tuple[Text, int], ...]:
        """Every text with its number of samples: its share, rounded so that they add up to `samples`."""
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
                raise ValueError(f"text.{position}.share: gives this text none of {self.samples} samples")
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
