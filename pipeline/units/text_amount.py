"""The unit that measures how much calibration text is enough."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.units.base import WorkUnit

HELD_OUT_EVERY = 8  # every eighth sample is held out, to evaluate the fits


@dataclass(frozen=True)
class MeasureText(WorkUnit):
    """Fits the values of a point in the first layer from increasing numbers of samples.

    The result is the error of each fit on held-out samples (`pipeline.kernels.held_out`).

    Attributes:
        point: the point whose values are fitted.
        samples: the total number of samples.
    """

    point: str
    samples: int

    @property
    def key(self) -> str:
        return f"measuretext/{self.samples}"


def groups_of(samples: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return four disjoint groups of samples: held-out ones, a quarter of the others, another quarter, and the rest."""
    held_out = range(0, samples, HELD_OUT_EVERY)
    others = [sample for sample in range(samples) if sample % HELD_OUT_EVERY]
    quarter = [sample for sample in others if sample % 4 == 1]
    to_half = [sample for sample in others if sample % 4 == 3]
    rest = [sample for sample in others if sample % 2 == 0]
    return tuple(held_out), tuple(quarter), tuple(to_half), tuple(rest)
