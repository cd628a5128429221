"""The cost of a healing: the teacher's pass and the student's steps. docs/plan.md#work-of-a-layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from manifests.heal import CHECKPOINTED_BYTES, EVALUATED_TOKENS, LOGIT_ROWS, MICRO_TOKENS, TrainingMemory, step_windows
from manifests.schema import Manifest, Workers
from pipeline.cost_model.prices import WORKERS_SECONDS
from pipeline.cost_model.rates import BACK, NOMINAL_CPU, Rates
from pipeline.cost_model.work import scoring_flops
from pipeline.families.geometry import Geometry
from pipeline.kernels.teacher_rows import row_bytes
from pipeline.units.sharding import HELD_OUT, HELD_OUT_TOKENS

DEFAULT_LENGTH = 2048  # tokens of a window in a job without calibration
EVALUATIONS = 9
# In forward passes: a step, whose gradient of the embeddings and of the head is not computed; the same, if the backward
# pass repeats the forward pass.
PRODUCTS, CHECKPOINTED = BACK, BACK + 1
MASTER_BYTES = 4  # bytes of a number in training
STATE_BYTES = 4 + 4 + 4  # bytes beside a trained number: its gradient, both moments of Adam
# Bytes of a number in a step between processes, or between host and GPU: gathered twice, its gradient summed once.
EXCHANGED = 3 * MASTER_BYTES
UPDATED = 7 * MASTER_BYTES  # bytes of a number that AdamW reads and writes in host memory
LONG_GROUP = 1024  # about how many columns share a scale where each row has one
MULTIPLIED_OUT = 8  # bytes to multiply out a code in float32: its level, and the level times the scale
ROW_TENSORS = 6  # float32 tensors as large as the logits of some rows
LAYER_KERNELS = 20_000_000  # bytes of the compiled kernels of a layer: three of each of about ten matrices, on a CPU
ACTIVATION_NUMBERS = 32  # numbers for each token and layer, in units of the hidden size


@dataclass(frozen=True)
class HealingWork:
    """The work of a healing.

    Attributes:
        tokens: trained tokens, once.
        workers: the settings of the processes that train.
        teacher_flops, training_flops, evaluation_flops: operations, of all processes together.
        trained_numbers: the trained numbers, once for each step.
        memory: the memory of the processes; disk_bytes: bytes in the run directory.
    """

    tokens: int
    workers: Workers
    teacher_flops: float
    training_flops: float
    evaluation_flops: float
    trained_numbers: float
    memory: TrainingMemory
    disk_bytes: int

    @property
    def processes(self) -> int:
        """The number of processes that train."""
        return self.workers.max

    def offloads(self, rates: Rates) -> bool:
        """Return True if a process's part of the layers is in host memory, because a GPU does not hold it."""
        return self.workers.gpus > 0 and self.memory.offloads(self.processes, rates.device_bytes)

    def memory_bytes(self, rates: Rates) -> int:
        """Return the memory of a process on its device."""
        host = 0 if self.workers.gpus else self.memory.on_host(self.processes)
        return host + self.memory.on_device(self.processes, self.offloads(rates))

    def exchanged_bytes(self) -> float:
        """Return the bytes that a process gets from the others."""
        return EXCHANGED * self.trained_numbers if self.processes > 1 else 0.0

    def seconds(self, rates: Rates, workers: int) -> dict[str, float]:
        """Return the seconds by phase. All workers pass the dense model, and as many processes train."""
        computing = self.training_flops / rates.backward + self.evaluation_flops / rates.single
        teacher = WORKERS_SECONDS + self.teacher_flops / rates.single / workers
        heal = WORKERS_SECONDS + computing / self.processes
        heal += self.exchanged_bytes() / rates.network if self.processes > rates.workers_per_node else 0.0
        if self.offloads(rates):
            updates = UPDATED / (NOMINAL_CPU.memory * self.workers.cpus)
            heal += self.trained_numbers / self.processes * (EXCHANGED / rates.link + updates)
        return {"score teacher": teacher, "heal": heal}

    def report(self, rates: Rates) -> Mapping[str, float]:
        """Return the figures of the plan's report."""
        offloads = self.offloads(rates)
        return {
            "healing_bytes": self.memory_bytes(rates),
            "healing_disk_bytes": self.disk_bytes,
            "healing_processes": self.processes,
            "healing_tokens": self.tokens,
            **({"healing_host_bytes": self.memory.on_host(self.processes, offloads)} if offloads else {}),
        }


def healing_work(manifest: Manifest, geometry: Geometry, share: float, tokens: int | None = None) -> HealingWork | None:
    """Return the work of a job's healing; None without one, or if its text has an unknown number of tokens.

    `share`: numbers of the compressed model, relative to the dense one's. `tokens`: of the text, if it was read.
    """
    heal, calibration = manifest.heal, manifest.calibration
    if heal is None:
        return None
    length = calibration.sequence_length if calibration else DEFAULT_LENGTH
    if tokens is None:
        tokens = heal.tokens
    if tokens is None and heal.text is None and calibration is not None:
        tokens = calibration.samples * length
    if tokens is None:
        return None
    held_out = min(tokens // HELD_OUT, HELD_OUT_TOKENS)
    dense = scoring_flops(geometry, length)
    processes, windows = manifest.workers.max, max(1, tokens // length)
    steps = math.ceil(heal.epochs * windows / step_windows(windows, length, heal.epochs, processes))
    numbers, itemsize = int(geometry.model_numbers() * share), geometry.bits // 8
    memory, trained, passes = _training(manifest, geometry, numbers, length)
    rows = tokens * row_bytes(geometry.vocab) + held_out * geometry.hidden * 4
    return HealingWork(
        tokens=tokens,
        workers=manifest.workers,
        teacher_flops=(tokens + held_out) * dense,
        training_flops=heal.epochs * tokens * dense * share * passes,
        evaluation_flops=EVALUATIONS
        * min(held_out, EVALUATED_TOKENS)
        * (dense * share + 2.0 * geometry.hidden * geometry.vocab),
        trained_numbers=float(steps * trained),
        memory=memory,
        disk_bytes=rows + numbers * itemsize + 2 * trained * (MASTER_BYTES + 8 + itemsize),
    )


def _training(manifest: Manifest, geometry: Geometry, numbers: int, length: int) -> tuple[TrainingMemory, int, int]:
    """Return the memory of the processes, the trained numbers, and the cost of a step in forward passes.

    `numbers`: of the compressed model. `length`: tokens of a window.
    """
    heal, rounding, layers = manifest.heal, manifest.quantize, geometry.num_layers
    outside = min(numbers, geometry.model_numbers() - geometry.decoder_numbers())  # embeddings and head
    inputs = 4 * geometry.hidden * layers * max(length, MICRO_TOKENS)  # of all layers
    activations = ACTIVATION_NUMBERS * inputs
    twice = activations > CHECKPOINTED_BYTES
    written = trained = numbers - outside
    divided, whole = 0, outside * MASTER_BYTES
    if rounding is not None:  # rows are multiplied out while a layer computes
        trained = written if heal and heal.what == "codes" else written // (rounding.group or LONG_GROUP)
        if "head" in rounding.outer_roles:  # the dense head, beside the rounded one
            whole += MASTER_BYTES * geometry.hidden * geometry.vocab
        divided = written * max(rounding.choices) // 8
        whole += MULTIPLIED_OUT * (written // layers if twice else written)
    whole += LOGIT_ROWS * ROW_TENSORS * 4 * geometry.vocab + (0 if manifest.workers.gpus else LAYER_KERNELS * layers)
    whole += activations // layers + inputs if twice else activations
    memory = TrainingMemory(
        divided=divided + trained * (MASTER_BYTES + STATE_BYTES),
        copies=trained * (MASTER_BYTES + geometry.bits // 8),
        whole=whole,
        gathered=(2 + 2) * MASTER_BYTES * (trained // layers),  # weights, and gradients
    )
    return memory, trained, CHECKPOINTED if twice else PRODUCTS
