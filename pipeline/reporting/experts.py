"""Heat maps of mixtures, layer by expert: the tokens that passed, the width that stays, the predicted loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from pipeline.console.expert_groups import expert_number
from pipeline.methods.method import read_task_key
from pipeline.reporting.drawing import Plot, draw
from pipeline.reporting.run_data import Run

ByExpert = Mapping[tuple[int, int], float]  # (layer, expert) -> value
HEIGHT_INCHES = 3.1
LEAST = 1e-12  # nats: smaller losses have the colour of this one


def expert_plots(run: Run, losses: Mapping[str, float]) -> list[Plot]:
    """Draw what is known of each expert; nothing for a model without experts.

    `losses`: task -> predicted loss of the chosen size.
    """
    tokens, widths = {}, {}
    for layer, entry in run.layers.items():
        for group, group_report in entry.groups.items():
            if (number := expert_number(group)) is None:
                continue
            report = group_report.as_json()
            if isinstance(count := report.get("tokens"), int):
                tokens[layer, number] = float(count)
            if (width := report["ranks"].get("width")) is not None:
                full = run.geometry.layers[layer].block(f"experts.{number}").matrices[0].outputs
                widths[layer, number] = width / full
    lost = {}
    for task, loss in losses.items():
        layer, _, group = read_task_key(task)
        if (number := expert_number(group)) is not None:
            lost[layer, number] = max(loss, LEAST)
    maps = [
        ("tokens", tokens, True, "calibration tokens", "Calibration tokens that the router sent to each expert."),
        ("widths", widths, False, "share of channels", "Share of its channels that each expert keeps."),
        ("losses", lost, True, "nats per token", "Predicted loss of the chosen size of each expert."),
    ]
    return [_heat_map(name, *rest) for name, *rest in maps if rest[0]]  # type: ignore[arg-type]


def _heat_map(name: str, values: ByExpert, logarithmic: bool, label: str, caption: str) -> Plot:
    layers = sorted({layer for layer, _ in values})
    experts = 1 + max(expert for _, expert in values)
    table_LE = np.full((len(layers), experts), np.nan)
    for (layer, expert), value in values.items():
        table_LE[layers.index(layer), expert] = value
    positive = table_LE[table_LE > 0]
    scale = (
        LogNorm(positive.min(), max(positive.max(), positive.min() * 10.0))
        if logarithmic and len(positive)
        else Normalize(0.0, max(1.0, float(np.nanmax(table_LE))))
    )

    def plot(axes: Axes) -> None:
        image = axes.pcolormesh(np.arange(experts + 1) - 0.5, np.arange(len(layers) + 1) - 0.5, table_LE, norm=scale)
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(image, ax=axes, label=label)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        axes.set_title(f"experts: {label}")

    return draw("ranks", f"experts-{name}", caption, plot, HEIGHT_INCHES)
