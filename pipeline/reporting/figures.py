"""Draws the plots of a run, without those for which it has no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from manifests.records import Curve
from pipeline.console.expert_groups import EXPERTS, expert_number, split_experts
from pipeline.methods.method import read_task_key, task_key
from pipeline.methods.registry import build_methods
from pipeline.reporting.drawing import (
    DASHES,
    GRID,
    INK,
    MARKERS,
    SERIES,
    Plot,
    by_layer,
    depth_colour,
    draw,
    legend_below,
    make_logarithmic,
)
from pipeline.reporting.experts import expert_plots
from pipeline.reporting.run_data import Run
from pipeline.reporting.time_figures import commits, memory, phases, timeline, tokens

MEBI = 2**20
WITH_LEGEND_INCHES = 3.1  # the height of a plot with a legend below


def plots_of(run: Run, section: str) -> list[Plot]:
    """Draw the plots of a section of the page, a key of `PLOTS`."""
    return [plot for plots in PLOTS[section] for plot in plots(run)]


def _importance(run: Run) -> list[Plot]:
    if not run.importance:
        return []
    layers = sorted(run.importance)

    def plot(axes: Axes) -> None:
        axes.bar(layers, [run.importance[layer] for layer in layers], color=SERIES[0])
        by_layer(axes, run.geometry.num_layers, "share")
        axes.set_title("importance")

    caption = "Each layer's share of the change of direction of hidden states on calibration text. Ranks follow it."
    return [draw("importance", caption, plot)]


def _ranks(run: Run) -> list[Plot]:
    """Draw one plot for every rank that a method chooses."""
    ranks_of: dict[tuple[int, str, str], dict[int, int]] = {}
    for task, ranks in run.ranks.items():
        layer, method, group = read_task_key(task)
        for name, rank in ranks.items() if expert_number(group) is None else ():
            ranks_of.setdefault((method, group, name), {})[layer] = rank
    return [_rank_plot(run, *key, rank_by_layer) for key, rank_by_layer in ranks_of.items()]


def _rank_plot(run: Run, method: int, group: str, name: str, rank_by_layer: Mapping[int, int]) -> Plot:
    layers = sorted(rank_by_layer)
    full = [cap for layer in layers if (cap := run.caps.get((task_key(layer, method, group), name)))]
    title = group if name == group else f"{group}: {name}"

    def plot(axes: Axes) -> None:
        if len(full) == len(layers):
            axes.step(layers, full, where="mid", color=INK, linestyle="--", linewidth=1.0)
        axes.plot(layers, [rank_by_layer[layer] for layer in layers], color=SERIES[0], marker=MARKERS[0])
        by_layer(axes, run.geometry.num_layers, "rank")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 1.08 * max([*full, *rank_by_layer.values()]))
        axes.set_title(f"rank of {title}")

    method_name = build_methods(run.manifest)[int(method)].name
    caption = f"Rank of {title} ({method_name}) in each layer. The dashed line is the full rank."
    return draw(f"rank-{method}-{group}-{name}", caption, plot)


def _stored(run: Run) -> list[Plot]:
    if not run.layers:
        return []
    layers = sorted(run.layers)
    stored = {layer: _by_shown_group(run.stored_bytes(layer)) for layer in layers}
    names = {group for by_group in stored.values() for group in by_group}
    groups = sorted(names, key=lambda group: (group == "rest", group))

    def plot(axes: Axes) -> None:
        _stack(axes, layers, {group: [stored[layer].get(group, 0) / MEBI for layer in layers] for group in groups})
        axes.axhline(run.plan.layer_bytes / MEBI, color=INK, linestyle="--", linewidth=1.0, label="dense")
        by_layer(axes, run.geometry.num_layers, "MiB")
        axes.set_title("stored bytes")
        legend_below(axes, 4)

    caption = "Bytes that each compressed layer stores, by group. The dashed line is a layer of the source."
    return [draw("stored", caption, plot, WITH_LEGEND_INCHES)]


def _stack(axes: Axes, layers: Sequence[int], heights_by_group: Mapping[str, Sequence[float]]) -> None:
    """Draw a stack of bars for each layer, a colour for each group."""
    bottom = [0.0] * len(layers)
    for place, (group, heights) in enumerate(heights_by_group.items()):
        colour = GRID if group == "rest" else SERIES[place % len(SERIES)]
        axes.bar(layers, heights, bottom=bottom, color=colour, label=group)
        bottom = [under + height for under, height in zip(bottom, heights, strict=True)]


def _curves(run: Run) -> list[Plot]:
    groups: dict[str, list[str]] = {}
    for task in run.curves:
        if expert_number(group := read_task_key(task).group) is None:
            groups.setdefault(group, []).append(task)
    return [_curve_plot(run, group, tasks) for group, tasks in groups.items()]


def _curve_plot(run: Run, group: str, tasks: list[str]) -> Plot:
    deepest = max(1, run.geometry.num_layers - 1)

    def plot(axes: Axes) -> None:
        for task in sorted(tasks, key=lambda task: read_task_key(task).layer):
            curve, colour = run.curves[task], depth_colour(read_task_key(task).layer / deepest)
            points = [(share, loss) for share, loss in _frontier(curve) if loss]
            axes.plot([share for share, _ in points], [loss for _, loss in points], color=colour, linewidth=0.9)
            chosen = chosen_point(run, task)
            if chosen is not None and curve.loss[chosen]:
                share = curve.numbers[chosen] / curve.numbers[-1]
                axes.plot(share, curve.loss[chosen], MARKERS[0], color=colour)
        _label_lines_by_depth(axes, run, "share of the dense numbers stored", "nats per token")
        axes.set_title(f"predicted loss of {group}")

    caption = f"Predicted loss of {group} by stored numbers, a line for each layer. A dot is the chosen size."
    return draw(f"curves-{group}", caption, plot)


def _label_lines_by_depth(axes: Axes, run: Run, x_label: str, y_label: str) -> None:
    """Label the axes of lines that are coloured by layer, with a logarithmic y axis."""
    make_logarithmic(axes)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    first, last = (Line2D([], [], color=depth_colour(depth)) for depth in (0.0, 1.0))
    axes.legend([first, last], ["layer 0", f"layer {run.geometry.num_layers - 1}"], loc="lower left")


def _frontier(curve: Curve) -> list[tuple[float, float]]:
    """Return (share of the dense numbers, loss) of the points with less loss than every smaller point."""
    frontier: list[tuple[float, float]] = []
    for numbers, loss in sorted(zip(curve.numbers, curve.loss, strict=True)):
        if not frontier or loss < frontier[-1][1]:
            frontier.append((numbers / curve.numbers[-1], loss))
    return frontier


def chosen_point(run: Run, task: str) -> int | None:
    """Return the index of the chosen ranks in a task's curve, or None if ranks are not chosen or not on the curve."""
    ranks, curve = run.ranks.get(task), run.curves[task]
    if ranks is None:
        return None
    indices = range(len(curve.numbers))
    return next((i for i in indices if all(curve.ranks[name][i] == rank for name, rank in ranks.items())), None)


def _predicted_loss(run: Run) -> list[Plot]:
    chosen = _chosen_losses(run)
    if not chosen:
        return []
    layers = sorted({read_task_key(task).layer for task in chosen})
    groups = sorted({_shown(read_task_key(task).group) for task in chosen})
    loss = {group: dict.fromkeys(layers, 0.0) for group in groups}
    for task, lost in chosen.items():
        layer, _, group = read_task_key(task)
        loss[_shown(group)][layer] += lost

    def plot(axes: Axes) -> None:
        _stack(axes, layers, {group: list(losses.values()) for group, losses in loss.items()})
        by_layer(axes, run.geometry.num_layers, "nats per token")
        axes.set_title("predicted loss by layer")
        legend_below(axes, 4)

    caption = "Predicted loss of the chosen sizes, by layer and group."
    return [draw("predicted-loss", caption, plot, WITH_LEGEND_INCHES)]


def _chosen_losses(run: Run) -> dict[str, float]:
    """Map each task whose ranks are on its curve to the predicted loss there."""
    chosen = ((task, chosen_point(run, task)) for task in run.curves)
    return {task: run.curves[task].loss[point] for task, point in chosen if point is not None}


def _shown(group: str) -> str:
    """Return the name of a group in plots; all experts share one name."""
    return group if expert_number(group) is None else EXPERTS


def _by_shown_group(values: Mapping[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for group, value in values.items():
        totals[_shown(group)] = totals.get(_shown(group), 0) + value
    return totals


def _errors(run: Run) -> list[Plot]:
    errors = _figures(run, "error")
    if not any(value > 0 for values in errors.values() for value in values.values()):
        return []
    caption = "Relative squared error of each group: 1 minus its kept energy. It is zero at full rank."
    return [_line_plot(run, "errors", "relative squared error", errors, caption)]


def _refinement(run: Run) -> list[Plot]:
    refined = {layer: entry.refined for layer, entry in sorted(run.layers.items()) if entry.refined is not None}
    if not refined:
        return []
    lines = {
        "held-out, before": {layer: figures.before for layer, figures in refined.items()},
        "held-out, after": {layer: figures.after for layer, figures in refined.items()},
        "training, before": {layer: figures.train_before for layer, figures in refined.items()},
        "training, after": {layer: figures.train_after for layer, figures in refined.items()},
    }
    caption = "Error of each layer's outputs, relative to the dense layer's, before and after refinement."
    return [_line_plot(run, "refinement", "error before and after refinement", lines, caption)]


def _healing(run: Run) -> list[Plot]:
    if (curve := run.healing) is None:
        return []

    def plot(axes: Axes) -> None:
        axes.plot(curve.steps, curve.divergences, color=SERIES[0], marker=MARKERS[0])
        best = curve.divergences[curve.steps.index(curve.best)]
        axes.plot([curve.best], [best], MARKERS[1], color=SERIES[1])
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        axes.set_title("divergence while healing")

    caption = "Divergence from the dense model on held-out text, by step of the healing. The best weights are kept."
    return [draw("healing", caption, plot)]


def _conditions(run: Run) -> list[Plot]:
    conditions = _figures(run, "condition")
    if not conditions:
        return []
    caption = "Condition number of the linear system of each group. The table lists fallbacks."
    return [_line_plot(run, "conditions", "condition number", conditions, caption)]


def _spectra(run: Run) -> list[Plot]:
    spectra: dict[str, dict[int, tuple[Sequence[float], float]]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, group_report in split_experts(entry.groups)[0].items():
            report = group_report.as_json()
            for name in sorted(name for name in report if name.endswith("spectrum")):
                error = report.get(name.removesuffix("spectrum") + "error", 0.0)
                line = f"{group}: {name.removesuffix('_spectrum')}" if name != "spectrum" else group
                spectra.setdefault(line, {})[layer] = (report[name], error)
    return [_spectrum_plot(run, line, values) for line, values in spectra.items()]


def _spectrum_plot(run: Run, line: str, values: Mapping[int, tuple[Sequence[float], float]]) -> Plot:
    deepest = max(1, run.geometry.num_layers - 1)

    def plot(axes: Axes) -> None:
        for layer, (beyond, error) in values.items():
            colour, steps = depth_colour(layer / deepest), len(beyond) - 1
            points = [(step / steps, share) for step, share in enumerate(beyond) if share > 0]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.9)
            if error > 0:
                at = next(step for step, share in enumerate(beyond) if share <= error)
                before, after = beyond[max(0, at - 1)], beyond[at]
                part = (before - error) / (before - after) if before > after else 0.0
                axes.plot(max(0.0, at - 1 + part) / steps, error, MARKERS[0], color=colour)
        _label_lines_by_depth(axes, run, "share of the full rank", "energy beyond it")
        axes.set_title(f"spectrum of {line}")

    caption = f"Share of the energy of {line} beyond a rank, a line for each layer. A dot is the chosen rank."
    return draw(f"spectrum-{line.replace(': ', '-')}", caption, plot)


def _figures(run: Run, suffix: str) -> dict[str, dict[int, float]]:
    """Return `group` or `group: figure` -> layer -> value, of the reported figures whose name has this suffix."""
    figures: dict[str, dict[int, float]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, report in split_experts(entry.groups)[0].items():
            for name, value in sorted(report.as_json().items()):
                if name.endswith(suffix) and isinstance(value, float):
                    line = group if name == suffix else f"{group}: {name.removesuffix(suffix).strip('_')}"
                    figures.setdefault(line, {})[layer] = value
    return figures


def _line_plot(run: Run, name: str, label: str, lines: Mapping[str, Mapping[int, float]], caption: str) -> Plot:
    def plot(axes: Axes) -> None:
        for place, (line, values) in enumerate(lines.items()):
            shown = {layer: value for layer, value in values.items() if value > 0}
            (drawn,) = axes.plot(list(shown), list(shown.values()), label=line, color=SERIES[place % len(SERIES)])
            drawn.set(linestyle=DASHES[place % len(DASHES)], marker=MARKERS[place % len(MARKERS)])
        make_logarithmic(axes)
        by_layer(axes, run.geometry.num_layers, label)
        axes.set_title(label)
        legend_below(axes, 3)

    return draw(name, caption, plot, WITH_LEGEND_INCHES)


def _experts(run: Run) -> list[Plot]:
    return expert_plots(run, _chosen_losses(run))


# Section of the page -> the functions that draw its plots, in order. One without data draws none.
PLOTS: Mapping[str, tuple[Callable[[Run], list[Plot]], ...]] = {
    "Ranks": (_importance, _experts, _ranks, _stored),
    "Loss curves": (_curves, _predicted_loss),
    "Errors and conditions": (_errors, _refinement, _healing, _spectra, _conditions),
    "Time": (commits, timeline, tokens, memory, phases),
}
