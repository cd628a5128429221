"""Rates of this machine from small matrices: no test looks at them closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.cost_model import probe

SIZES = {
    "LARGEST_HIDDEN": 128,
    "LONGEST": 64,
    "DOUBLE_SIZE": 64,
    "MOMENT_TOKENS": 64,
    "COPIED_BYTES": 2**16,
    "WIDENED_NUMBERS": 2**16,
}


def probe_small_matrices(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """A few times: the products of a published model's layer take ten seconds a plan."""
    patch(probe, "PROBE_SECONDS", 0.01)
    patch(probe, "DIGESTED_BYTES", 2**16)
    for name, size in SIZES.items():
        patch(probe, name, {**getattr(probe, name), "cpu": size})
