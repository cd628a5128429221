"""The field `budget.fit`: the memory that an engine may take for a model and its cache. docs/manifest.md."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from manifests.blocks import ManifestBlock
from manifests.engines import Engine

UNITS = {"GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "TB": 10**12, "TIB": 2**40}
AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.ASCII | re.IGNORECASE)

Device = Literal["gpu", "cpu"]
DEVICES: tuple[Device, ...] = get_args(Device)


def memory_bytes(memory: Any) -> Any:
    """Return the bytes of an amount such as 24GB (10⁹ bytes each) or 24GiB; other values unchanged.

    Raises ValueError for text that is no amount.
    """
    if not isinstance(memory, str):
        return memory
    matched = AMOUNT.fullmatch(memory)
    if matched is None or matched[2].upper() not in UNITS:
        raise ValueError("should be an amount with a unit, such as 24GB or 24GiB, or a whole number of bytes")
    return round(float(matched[1]) * UNITS[matched[2].upper()])


def memory_text(num_bytes: int) -> str:
    """Return an amount that `memory_bytes` reads back, in the largest unit that divides it."""
    units = ((unit, size) for unit, size in (("GB", 10**9), ("GiB", 2**30), ("MB", 10**6)) if num_bytes % size == 0)
    return next((f"{num_bytes // size}{unit}" for unit, size in units), str(num_bytes))


Memory = Annotated[int, Field(gt=0, le=10**15), BeforeValidator(memory_bytes)]


class Fit(ManifestBlock):
    """The memory in which an engine should serve the output; the bytes of its weights follow. docs/plan.md#fit.

    `memory`: of the device, such as 24GB (10⁹ bytes each) or 24GiB (2³⁰ each), or in bytes. `context`: the tokens of a
    sequence, prompt and answer. `sequences`: served at a time. `device`: the memory is that of a GPU, or of a process
    on a CPU.
    """

    memory: Memory
    context: Annotated[int, Field(gt=0, le=10**8)]
    sequences: Annotated[int, Field(gt=0, le=10**6)] = 1
    engine: Engine = "transformers"
    device: Device = "gpu"
