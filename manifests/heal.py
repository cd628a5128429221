"""Healing of a manifest: the compressed model is trained as a whole against the dense one. docs/methods.md#healing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manifests.blocks import Count, LearningRate, ManifestBlock
from manifests.calibration import Text

# How a healing trains, for the training and for its plan.
STEPS = 256  # of a training, about; more for a long text
STEP_TOKENS = 4096  # in a step, at most; at least a window for each process
MICRO_TOKENS = 2048  # about; in the windows that pass the model at a time
EVALUATED_TOKENS = 8_192  # of held-out windows at most, which a healing scores nine times
CHECKPOINTED_BYTES = 4 * 2**30  # activations of a micro-batch from this size on are computed twice
LOGIT_ROWS = 256  # tokens whose logits are in memory at a time


def step_windows(windows: int, length: int, epochs: int, processes: int) -> int:
    """Return the windows of a step, for a text of `windows` of `length` tokens and for `processes` that train."""
    return max(1, min(windows * epochs // STEPS, STEP_TOKENS // length), processes)


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of the processes that train, in bytes.

    Attributes:
        divided: weights, gradients and moments of the layers, of all processes together.
        copies: copies of trained numbers that wait in host memory, of all processes together.
        whole: of each process on its device: embeddings, head, logits and activations.
        gathered: of each process on its device, if it holds parts of layers: a whole layer and the next one, the
            gradients of the one, and the copy of those of the layer before it from which they are summed.
    """

    divided: int
    copies: int
    whole: int
    gathered: int

    def on_device(self, processes: int, offloaded: bool = False) -> int:
        """Return the bytes of a process on its device. `offloaded`: its part of the layers is in host memory."""
        in_parts = processes > 1 or offloaded
        return self.whole + (self.gathered if in_parts else 0) + (0 if offloaded else self.divided // processes)

    def on_host(self, processes: int, offloaded: bool = False) -> int:
        """Return the bytes of a process in host memory, beside those on a GPU."""
        return (self.copies + (self.divided if offloaded else 0)) // processes

    def offloads(self, processes: int, device_bytes: float) -> bool:
        """Return True if a GPU of `device_bytes` does not hold a process's part of the layers, so that it is in host
        memory."""
        return self.on_device(processes) > device_bytes


def device_fault(needed: float, processes: int, device_bytes: float) -> str:
    """Return the message about GPUs that are too small, even if the layers are in host memory."""
    return (
        f"heal needs {needed / 1e9:,.0f} GB of each of {processes} GPUs with the layers in host memory, and each has "
        f"{device_bytes / 1e9:,.0f}; leave out heal, or take a larger one"
    )


def host_fault(needed: float, processes: int, host_bytes: float) -> str:
    """Return the message about too little host memory beside GPUs that do not hold the layers.

    `needed`, `host_bytes`: for each of the `processes` of a machine.
    """
    return (
        f"heal needs {needed / 1e9:,.1f} GB of host memory for each of {processes} processes, since their GPUs do not "
        f"hold the layers, and there are {host_bytes / 1e9:,.1f}; raise workers.max on more machines, or leave out heal"
    )


class Heal(ManifestBlock):
    """Training of the whole compressed model against the dense one, [methods.md#healing](methods.md#healing).

    It follows the solve, and is no part of it: a finished job that gets this field pays for the healing alone. `python
    -m pipeline.heal RUN_DIR` adds it.

    `text`: the text to train on; null: the calibration samples. `tokens`: how many of its tokens; null: all. `epochs`:
    how often each window is trained on. `learning_rate`: the largest, of all tensors; `auto` gives each tensor a share
    of its mean magnitude: at a hidden size of 576, 2e-4 for matrices and 1.2e-3 for scales, levels, norms and biases,
    less for wider models. `what`: `auto` trains factors, coefficients, refitted matrices, norms and biases of
    compressed layers, and scales and levels of rounded ones; `codes` also chooses the codes of rounded matrices again;
    `norms` trains norms and biases alone. Embeddings, heads and routers stay.
    """

    text: Text | None = None
    tokens: Count | None = None
    epochs: Count = 1
    learning_rate: LearningRate = "auto"
    what: Literal["auto", "codes", "norms"] = "auto"
