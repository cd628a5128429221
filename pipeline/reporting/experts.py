"""Heat maps of mixtures, layer by expert: routed tokens, kept width, predicted loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from pipeline.console.expert_groups import EXPERTS, expert_number
from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT, SALIENCY_BY_EXPERT, TOKENS_BY_EXPERT
from pipeline.methods.method import read_task_key
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.reporting.drawing import Plot, draw
from pipeline.reporting.run_data import Run

ByExpert = Mapping[tuple[int, int], float]  # (layer, expert) -> value
HEIGHT_INCHES = 3.1
LEAST = 1e-12  # nats: smaller losses have the colour of this one
NAMED = 5  # experts furthest from the text's own division, in a caption
SCORES = {"removals": REMOVAL_LOSS_BY_EXPERT, "saliencies": SALIENCY_BY_EXPERT}  # map -> field of a report
MAPS = {  # name -> logarithmic colours, label, caption
    "tokens": (
        True,
        "calibration tokens",
        "Calibration tokens that the router sent to each expert; of a sample, where whole experts are removed.",
    ),
    "widths": (False, "share of channels", "Share of its channels that each expert keeps; 0 if it is removed."),
    "removals": (True, "nats per token", "Predicted loss of removing each expert; the least are removed first."),
    "saliencies": (True, "mean of p‖f(m)‖", "Weighted output of each expert; the least are removed first."),
    "losses": (True, "nats per token", "Predicted loss of the chosen size of each expert."),
}


def expert_plots(run: Run, losses: Mapping[str, float]) -> list[Plot]:
    """Draw a heat map of each quantity in the run's reports of experts; none for a model without experts.

    `losses`: task -> predicted loss of the chosen size.
    """
    by_expert: dict[str, dict[tuple[int, int], float]] = {name: {} for name in ("tokens", "widths", *SCORES)}
    for layer, entry in run.layers.items():
        for group, group_report in entry.groups.items():
            report = group_report.as_json()
            seen = _of_group(run, layer, report) if group == EXPERTS else _of_expert(run, layer, group, report)
            for name, values in seen.items():
                by_expert[name] |= {(layer, number): value for number, value in values.items()}
    lost = {}
    for task, loss in losses.items():
        layer, _, group = read_task_key(task)
        if (number := expert_number(group)) is not None:
            lost[layer, number] = max(loss, LEAST)
    by_expert["losses"] = lost
    plots = [_heat_map(name, values, *MAPS[name]) for name, values in by_expert.items() if values]
    return plots + _source_plots(run)


def _source_plots(run: Run) -> list[Plot]:
    """Draw the share of each expert's tokens that come from each source of the text; nothing for one source."""
    tokens: dict[str, dict[tuple[int, int], int]] = {}
    for layer, entry in run.layers.items():
        for group, group_report in entry.groups.items():
            for source, counts in group_report.as_json().get(BY_SOURCE, {}).items():
                numbers = [expert_number(group)] if group != EXPERTS else range(len(counts))
                of_experts = counts if group == EXPERTS else [counts]
                tokens.setdefault(source, {}).update(
                    {
                        (layer, number): each
                        for number, each in zip(numbers, of_experts, strict=True)
                        if number is not None
                    }
                )
    totals = Counter[tuple[int, int]]()
    for counts in tokens.values():
        totals.update(counts)
    plots = []
    for place, (source, counts) in enumerate(tokens.items()):
        overall = sum(counts.values()) / max(1, totals.total())
        shares = {expert: count / totals[expert] for expert, count in counts.items() if totals[expert]}
        furthest = sorted(shares, key=lambda expert: -abs(shares[expert] - overall))[:NAMED]
        named = ", ".join(f"layer {layer} expert {number} {shares[layer, number]:.0%}" for layer, number in furthest)
        caption = (
            f"Share of each expert's sampled tokens that come from {source}; of all sampled tokens, {overall:.0%} do. "
            f"The experts furthest from that: {named}."
        )
        plots.append(_heat_map(f"source-{place}", shares, False, f"tokens from {source}", caption))
    return plots


def _of_expert(run: Run, layer: int, group: str, report: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return quantity -> expert -> value, by the report of a group of one expert; nothing for another group."""
    if (number := expert_number(group)) is None:
        return {}
    values: dict[str, dict[int, float]] = {}
    if isinstance(count := report.get("tokens"), int):
        values["tokens"] = {number: float(count)}
    if (width := report["ranks"].get("width")) is not None:
        values["widths"] = {number: width / _full_width(run, layer, number)}
    return values


def _of_group(run: Run, layer: int, report: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return quantity -> expert -> value, by the report of all experts of a layer. A removed expert has width 0."""
    count = run.geometry.layers[layer].num_experts
    kept = {int(number) for number in report.get("experts", range(count))}
    shares = {number: report.get("width", full) / full for number in kept if (full := _full_width(run, layer, number))}
    values = {"widths": {number: shares.get(number, 0.0) for number in range(count)}}
    fields = {"tokens": TOKENS_BY_EXPERT} | SCORES
    return values | {name: dict(enumerate(report[field])) for name, field in fields.items() if field in report}


def _full_width(run: Run, layer: int, expert: int) -> int:
    return run.geometry.layers[layer].block(f"{EXPERTS}.{expert}").matrices[0].outputs


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

    return draw(f"experts-{name}", caption, plot, HEIGHT_INCHES)
