"""The table of a report's figures: what each shows, of which data, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic

from matplotlib.axes import Axes

from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT, SALIENCY_BY_EXPERT
from pipeline.reporting import plots
from pipeline.reporting.drawing import Plot, draw
from pipeline.reporting.expert_data import by_expert, by_source
from pipeline.reporting.layer_data import curves, predicted_loss, ranks, refinement, reported, spectra, stored
from pipeline.reporting.run_data import Data, Run, T, single
from pipeline.reporting.time_data import commits, memory, phases, timeline, tokens

ELAPSED = "{unit} since the first unit of the last run"


@dataclass(frozen=True)
class Figure(Generic[T]):
    """One or several plots of a kind. Its texts may have words of `data` in braces.

    Attributes:
        data: returns the data of each plot, and words for its texts. A figure without data is not shown.
        plot: draws the data of one plot; its last argument is the number of layers.
        x, y: labels of the axes; `y` of a heat map is that of its colours.
        caption: the text below a plot, and its description for screen readers.
    """

    title: str
    data: Callable[[Run], Data[T]]
    plot: Callable[[Axes, T, int], None]
    x: str
    y: str
    caption: str


# Section of the page -> its figures.
FIGURES: Mapping[str, tuple[Figure[Any], ...]] = {
    "Ranks": (
        Figure("importance", lambda run: single(run.importance), plots.bars, "layer", "share",
            "Each layer's share of the change of direction of hidden states on calibration text. Ranks follow it."),
        Figure("experts: calibration tokens", partial(by_expert, "tokens"), plots.logarithmic_map, "expert",
            "calibration tokens",
            "Calibration tokens that the router sent to each expert; of a sample, where whole experts are removed."),
        Figure("experts: share of channels", partial(by_expert, "widths"), plots.heat_map, "expert",
            "share of channels", "Share of its channels that each expert keeps; 0 if it is removed."),
        Figure("experts: nats per token", partial(by_expert, REMOVAL_LOSS_BY_EXPERT), plots.logarithmic_map, "expert",
            "nats per token", "Predicted loss of removing each expert; the least are removed first."),
        Figure("experts: mean of p‖f(m)‖", partial(by_expert, SALIENCY_BY_EXPERT), plots.logarithmic_map, "expert",
            "mean of p‖f(m)‖", "Weighted output of each expert; the least are removed first."),
        Figure("experts: nats per token", partial(by_expert, "losses"), plots.logarithmic_map, "expert",
            "nats per token", "Predicted loss of the chosen size of each expert."),
        Figure("experts: tokens from {source}", by_source, plots.heat_map, "expert", "tokens from {source}",
            "Share of each expert's sampled tokens that come from {source}; of all sampled tokens, {overall} do. "
            "The experts furthest from that: {furthest}."),
        Figure("rank of {rank}", ranks, plots.ranks, "layer", "rank",
            "Rank of {rank} ({method}) in each layer. The dashed line is the full rank."),
        Figure("stored bytes", stored, plots.stacks, "layer", "MiB",
            "Bytes that each compressed layer stores, by group. The dashed line is a layer of the source."),
    ),
    "Loss curves": (
        Figure("predicted loss of {group}", curves, plots.lines_by_depth, "share of the dense numbers stored",
            "nats per token",
            "Predicted loss of {group} by stored numbers, a line for each layer. A dot is the chosen size."),
        Figure("predicted loss by layer", predicted_loss, plots.stacks, "layer", "nats per token",
            "Predicted loss of the chosen sizes, by layer and group."),
    ),
    "Errors and conditions": (
        Figure("relative squared error", partial(reported, "error"), plots.lines, "layer", "relative squared error",
            "Relative squared error of each group: 1 minus its kept energy. It is zero at full rank."),
        Figure("error before and after refinement", refinement, plots.lines, "layer",
            "error before and after refinement",
            "Error of each layer's outputs, relative to the dense layer's, before and after refinement."),
        Figure("divergence while healing", lambda run: single(run.healing), plots.healing, "step", "nats per token",
            "Divergence from the dense model on held-out text, by step of the healing. The best weights are kept."),
        Figure("spectrum of {line}", spectra, plots.lines_by_depth, "share of the full rank", "energy beyond it",
            "Share of the energy of {line} beyond a rank, a line for each layer. A dot is the chosen rank."),
        Figure("condition number", partial(reported, "condition"), plots.lines, "layer", "condition number",
            "Condition number of the linear system of each group. The table lists fallbacks."),
    ),
    "Time": (
        Figure("layers committed", commits, plots.commits, "{unit} since the first commit", "layers",
            "Time of the latest commit of each layer. A flat stretch is a wait or an interruption."),
        Figure("workers", timeline, plots.timeline, ELAPSED, "",
            "Units of each worker. Narrow bars are sums and writes in its second thread. A gap is idle time "
            "({idle} of the time from first to last unit)."),
        Figure("tokens per second", tokens, plots.rates, ELAPSED, "tokens / s",
            "Calibration tokens per second through a layer, of all workers together."),
        Figure("largest memory of a worker", memory, plots.memory, ELAPSED, "GiB",
            "The largest memory of any worker so far, beside the plan's."),
        Figure("seconds by phase", phases, plots.phases, "seconds", "", "Wall time of the last run, by phase."),
    ),
}  # fmt: skip


def draw_figures(run: Run) -> dict[str, list[Plot]]:
    """Draw all figures for which the run has data, by section."""
    names = map("figure-{}".format, count())
    return {
        section: [
            _draw(next(names), figure, data, words, run.geometry.num_layers)
            for figure in figures
            for data, words in figure.data(run)
        ]
        for section, figures in FIGURES.items()
    }


def _draw(name: str, figure: Figure[T], data: T, words: Mapping[str, str], num_layers: int) -> Plot:
    title, x, y, caption = (text.format(**words) for text in (figure.title, figure.x, figure.y, figure.caption))

    def plot(axes: Axes) -> None:
        axes.set(title=title, xlabel=x, ylabel=y)
        figure.plot(axes, data, num_layers)

    return draw(name, caption, plot)
