"""The unit that measures how much calibration text is enough."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.units.base import WorkUnit

HELD_OUT_EVERY = 8  # every so many samples, one judges the others


@dataclass(frozen=True)
class MeasureText(WorkUnit):
    """Fits the values of a point in the first layer, from more and more of the samples.

    The result is the error of each fit on samples that no fit has seen (`pipeline.kernels.held_out`).

    Attributes:
        point: whose values are fitted.
        samples: the number of all samples.
    """

    point: str
    samples: int

    @property
    def key(self) -> str:
        return f"measuretext/{self.samples}"


def groups_of(samples: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return disjoint groups of samples: those held out, a quarter, what makes it a half, and the rest."""
    held_out = range(0, samples, HELD_OUT_EVERY)
    others = [sample for sample in range(samples) if sample % HELD_OUT_EVERY]
    quarter = [sample for sample in others if sample % 4 == 1]
    to_half = [sample for sample in others if sample % 4 == 3]
    rest = [sample for sample in others if sample % 2 == 0]
    return tuple(held_out), tuple(quarter), tuple(to_half), tuple(rest)
