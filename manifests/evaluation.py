"""The block `evaluation` of a manifest: measurements of the finished output. docs/manifest.md."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from manifests.blocks import Count, Listed, ManifestBlock
from manifests.calibration import Prefix, Text

TASK_SETTINGS = ("fewshot", "chat_template", "limit")


class Perplexity(ManifestBlock):
    """Perplexity of the output on `text`, in windows of `window` tokens; `dense`: of the source as well.

    `prefix`: every window begins with the ids that the tokenizer puts before a text, such as a BOS; they count in its
    length and are not scored. `none`: it begins with the text itself, whose first token is not scored, as in published
    perplexities of WikiText.
    """

    text: Text
    window: Annotated[int, Field(ge=2)] = 2048
    prefix: Prefix = "tokenizer"
    dense: bool = False


class Evaluation(ManifestBlock):
    """Measurements of the finished output.

    `tasks`: names of lm-eval's tasks and groups, or YAML files of one each. The dense model is measured, too. The
    workers score both layer by layer, in float32.

    `fewshot`: answered documents before each question; null: as many as each task says. `chat_template`: contexts are
    written by the tokenizer's chat template, as instruct models expect. `limit`: only this many documents of each task
    are scored, from the first on; null: all.

    `whole_model`: the process that runs the job loads each model whole instead, as tasks that generate text need: over
    its node's GPUs, memory and disk, in the dtype of the weights.

    `calibrate_prediction`: the layers are also compressed to two other sizes, and the losses of these correct the
    predicted loss of every size from 0.9 to 0.5. For jobs with `budget.keep` whose methods all follow predicted loss.
    `budget.max_loss` measures several sizes anyway.
    """

    perplexity: Perplexity | None = None
    tasks: Annotated[tuple[str, ...], Listed] = ()
    fewshot: Annotated[int, Field(ge=0, le=1000)] | None = None
    chat_template: bool = False
    limit: Count | None = None
    whole_model: bool = False
    calibrate_prediction: bool = False

    @property
    def with_dense(self) -> bool:
        """True if the dense model's perplexity is measured, too."""
        return self.perplexity is not None and self.perplexity.dense

    @model_validator(mode="after")
    def _settings_have_tasks(self) -> Self:
        given = [name for name in TASK_SETTINGS if getattr(self, name) != Evaluation.model_fields[name].default]
        if given and not self.tasks:
            raise ValueError(f"{', '.join(given)}: settings of `tasks`, of which there are none; name some there")
        return self
