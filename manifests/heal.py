"""Healing of a manifest: the compressed model is trained as a whole against the dense one. docs/methods.md#healing."""

from __future__ import annotations

from typing import Literal

from manifests.blocks import Block, Count, LearningRate
from manifests.calibration import Text

# How a healing trains, for the training and for its plan.
STEPS = 256  # of a training, about; more for a long text
STEP_TOKENS = 4096  # in a step, at most; at least a window for each process
MICRO_TOKENS = 2048  # about; in the windows that pass the model at a time
CHECKPOINTED_BYTES = 4 * 2**30  # activations of a micro-batch from this size on are computed twice
LOGIT_ROWS = 256  # tokens whose logits are in memory at a time


def step_windows(windows: int, length: int, epochs: int, processes: int) -> int:
    """Return the windows of a step, for a text of `windows` of `length` tokens and for `processes` that train."""
    return max(1, min(windows * epochs // STEPS, STEP_TOKENS // length), processes)


class Heal(Block):
    """Training of the whole compressed model against the dense one, [methods.md#healing](methods.md#healing).

    It follows the solve, and is no part of it: a finished job that gets this field pays for the healing alone. `python
    -m pipeline.heal RUN_DIR` adds it.

    `text`: the text to train on; null: the calibration samples. `tokens`: how many of its tokens; null: all. `epochs`:
    how often each window is trained on. `learning_rate`: the largest, of all tensors; `auto` gives each tensor a share
    of its mean magnitude: at a hidden size of 576, 2e-4 for matrices and 4e-3 for scales, levels, norms and biases,
    less for wider models. `what`: `auto` trains factors, coefficients, refitted matrices, norms and biases of
    compressed layers, and scales and levels of rounded ones; `codes` also chooses the codes of rounded matrices again;
    `norms` trains norms and biases alone. Embeddings, heads and routers stay.
    """

    text: Text | None = None
    tokens: Count | None = None
    epochs: Count = 1
    learning_rate: LearningRate = "auto"
    what: Literal["auto", "codes", "norms"] = "auto"
