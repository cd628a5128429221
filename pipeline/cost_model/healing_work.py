"""The cost of a healing: the teacher's pass and the student's steps. docs/plan.md#work-of-a-layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manifests.schema import Manifest
from pipeline.cost_model.phases import WORKERS_SECONDS
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import scoring_flops
from pipeline.families.geometry import Geometry
from pipeline.kernels.teacher_rows import row_bytes

DEFAULT_LENGTH = 2048  # of a window in a job without calibration
HELD_OUT_SHARE, HELD_OUT_TOKENS = 10, 32_768  # of the text, and at most
EVALUATIONS = 9
PRODUCTS = 3.0  # forward, and two backward; the gradient of the embeddings and of the head is not computed
CHECKPOINTED = 4.0  # with the forward pass a second time
MASTER_BYTES = 4  # of a number in training
STATE_BYTES = 4 + 4 + 4 + 4  # of a trained number: gradient, both moments of Adam, a copy while it is evaluated
ROWS = 256  # tokens whose logits are in memory at a time
ROW_TENSORS = 6  # of their size, in float32
LONG_ACTIVATIONS = 4 * 2**30  # bytes of activations from which they are computed twice
MICRO_TOKENS = 2048
ACTIVATION_NUMBERS = 32  # for each token and layer, in units of the hidden size


@dataclass(frozen=True)
class HealingWork:
    """The work of a healing.

    Attributes:
        tokens: trained tokens, once; held_out: held-out tokens.
        teacher_flops, student_flops: operations of both.
        memory_bytes: of the process that trains; disk_bytes: in the run directory.
    """

    tokens: int
    held_out: int
    teacher_flops: float
    student_flops: float
    memory_bytes: int
    disk_bytes: int

    def seconds(self, rates: Rates, workers: int) -> dict[str, float]:
        """Return the seconds by phase. All workers pass the dense model, and one process trains."""
        teacher = WORKERS_SECONDS + self.teacher_flops / rates.single / workers
        return {"score teacher": teacher, "heal": WORKERS_SECONDS + self.student_flops / rates.single}

    def report(self) -> Mapping[str, float]:
        """Return the figures of the plan's report."""
        return {
            "healing_bytes": self.memory_bytes,
            "healing_disk_bytes": self.disk_bytes,
            "healing_tokens": self.tokens,
        }


def healing_work(manifest: Manifest, geometry: Geometry, share: float, itemsize: int) -> HealingWork | None:
    """Return the work of a job's healing; None without one, or if its text has an unknown number of tokens.

    `share`: numbers of the compressed model, relative to the dense one's. `itemsize`: bytes of a stored number.
    """
    heal, calibration = manifest.heal, manifest.calibration
    if heal is None:
        return None
    tokens = heal.tokens
    if tokens is None:
        if heal.text is not None or calibration is None:
            return None
        tokens = calibration.samples * calibration.sequence_length
    length = calibration.sequence_length if calibration else DEFAULT_LENGTH
    held_out = min(tokens // HELD_OUT_SHARE, HELD_OUT_TOKENS)
    dense = scoring_flops(geometry, length)
    activations = 4 * ACTIVATION_NUMBERS * geometry.hidden * geometry.num_layers * max(length, MICRO_TOKENS)
    twice = activations > LONG_ACTIVATIONS
    steps = heal.epochs * tokens * dense * share * (CHECKPOINTED if twice else PRODUCTS)
    numbers = int(geometry.model_numbers() * share)
    states = STATE_BYTES + itemsize  # the best weights so far
    memory = numbers * (MASTER_BYTES + states) + ROWS * ROW_TENSORS * 4 * geometry.vocab
    memory += activations // geometry.num_layers if twice else activations
    rows = tokens * row_bytes(geometry.vocab) + held_out * geometry.hidden * 4
    return HealingWork(
        tokens=tokens,
        held_out=held_out,
        teacher_flops=(tokens + held_out) * dense,
        student_flops=steps + EVALUATIONS * held_out * (dense * share + 2.0 * geometry.hidden * geometry.vocab),
        memory_bytes=memory,
        disk_bytes=rows + numbers * (itemsize + 2 * (MASTER_BYTES + 8 + itemsize)),
    )
