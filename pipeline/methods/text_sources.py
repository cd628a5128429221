"""The division of calibration tokens over the sources of the text. docs/methods.md#mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.refit import evenly_spread

BY_SOURCE = "tokens_by_source"  # field of a solution's report: source -> tokens, or tokens of each dense expert


@dataclass(frozen=True)
class TextSources:
    """The source of each calibration sample.

    Attributes:
        names: files and datasets of `calibration.text`, in its order.
        of_samples: the place of each sample's source among the names.
        sequence: the tokens of a sample.
    """

    names: tuple[str, ...] = ()
    of_samples: tuple[int, ...] = ()
    sequence: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """Map each source to its share of the samples."""
        return {name: self.of_samples.count(place) / len(self.of_samples) for place, name in enumerate(self.names)}

    def some(self, samples: Sequence[int]) -> TextSources:
        """Return the sources of some of the samples."""
        return TextSources(self.names, tuple(self.of_samples[sample] for sample in samples), self.sequence)

    def count(self, passed_T: Tensor) -> dict[str, int]:
        """Count the marked tokens by source; nothing where there is one source alone.

        `passed_T`: bool (T,), for the tokens of a sample statistic, which are spread evenly over all calibration
        tokens.
        """
        if len(self.names) < 2:
            return {}
        total = len(self.of_samples) * self.sequence
        samples_T = evenly_spread(0, total, total, len(passed_T)) // self.sequence
        sources_t = torch.tensor(self.of_samples)[samples_T][passed_T.cpu()]
        return dict(zip(self.names, sources_t.bincount(minlength=len(self.names)).tolist(), strict=True))


NO_SOURCES = TextSources()
