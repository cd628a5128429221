"""The plots of a run: each is drawn where the run has what it shows, else left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from manifests.records import Curve
from pipeline.methods.method import read_task_key, task_key
from pipeline.methods.registry import build_methods
from pipeline.reporting.drawing import (
    DASHES,
    GRID,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Plot,
    by_layer,
    depth_colour,
    draw,
    legend_below,
)
from pipeline.reporting.run_data import Run
from pipeline.reporting.time_figures import time_plots


def all_plots(run: Run) -> list[Plot]:
    """In the order of the page."""
    plots = [_importance(run), *_ranks(run), _stored(run), *_curves(run), _predicted_loss(run)]
    plots += [_errors(run), *_spectra(run), _conditions(run), *time_plots(run)]
    return [plot for plot in plots if plot is not None]


def _importance(run: Run) -> Plot | None:
    if not run.importance:
        return None
    layers = sorted(run.importance)

    def plot(axes: Axes) -> None:
        axes.bar(layers, [run.importance[layer] for layer in layers], color=SERIES[0])
        by_layer(axes, run.geometry.num_layers, "share")
        axes.set_title("importance")

    told = "How far each layer turns its input on calibration text: the share that its ranks follow."
    return Plot("ranks", draw("importance", plot), told)


def _ranks(run: Run) -> list[Plot]:
    """One plot for every rank that a method chooses."""
    found: dict[tuple[int, str, str], dict[int, int]] = {}
    for task, ranks in run.ranks.items():
        layer, method, group = read_task_key(task)
        for name, rank in ranks.items():
            found.setdefault((method, group, name), {})[layer] = rank
    return [_rank_plot(run, key, by) for key, by in found.items()]


def _rank_plot(run: Run, key: tuple[int, str, str], rank_by_layer: Mapping[int, int]) -> Plot:
    method, group, name = key
    layers = sorted(rank_by_layer)
    full = [cap for layer in layers if (cap := run.caps.get((task_key(layer, method, group), name)))]
    title = group if name == group else f"{group}: {name}"

    def plot(axes: Axes) -> None:
        if len(full) == len(layers):
            axes.step(layers, full, where="mid", color=MUTED, linestyle="--", linewidth=1.0)
        axes.plot(layers, [rank_by_layer[layer] for layer in layers], color=SERIES[0], marker=MARKERS[0])
        by_layer(axes, run.geometry.num_layers, "rank")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 1.08 * max(*full, *rank_by_layer.values()))
        axes.set_title(f"rank of {title}")

    method_name = build_methods(run.manifest)[int(method)].name
    told = f"Rank of {title} ({method_name}) in each layer; the dashed line is the full rank."
    return Plot("ranks", draw(f"rank-{method}-{group}-{name}", plot), told)


def _stored(run: Run) -> Plot | None:
    if not run.layers:
        return None
    layers = sorted(run.layers)
    stored = {layer: run.stored_bytes(layer) for layer in layers}
    groups = sorted({group for found in stored.values() for group in found}, key=lambda name: (name == "rest", name))
    mebi = 2**20

    def plot(axes: Axes) -> None:
        below = [0.0] * len(layers)
        for place, group in enumerate(groups):
            heights = [stored[layer].get(group, 0) / mebi for layer in layers]
            axes.bar(layers, heights, bottom=below, color=_colour(group, place), label=group, width=0.8)
            below = [under + height for under, height in zip(below, heights, strict=True)]
        axes.axhline(run.plan.layer_bytes / mebi, color=INK, linestyle="--", linewidth=1.0, label="dense")
        by_layer(axes, run.geometry.num_layers, "MiB")
        axes.set_title("stored bytes")
        legend_below(axes, 4)

    told = "Bytes that each compressed layer stores, by group; the dashed line is a layer of the source."
    return Plot("ranks", draw("stored", plot, height_inches=3.1), told)


def _curves(run: Run) -> list[Plot]:
    groups: dict[str, list[str]] = {}
    for task in run.curves:
        groups.setdefault(read_task_key(task).group, []).append(task)
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
        _by_depth(axes, run, "share of the dense numbers stored", "nats per token")
        axes.set_title(f"predicted loss of {group}")

    told = f"Predicted loss of {group} by what it stores, one line for each layer; a dot is what was chosen."
    return Plot("curves", draw(f"curves-{group}", plot), told)


def _by_depth(axes: Axes, run: Run, across: str, upward: str) -> None:
    """Axes of lines that are coloured by layer: what falls by orders of magnitude over a share."""
    axes.set_yscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    first, last = (Line2D([], [], color=depth_colour(depth)) for depth in (0.0, 1.0))
    axes.legend([first, last], ["layer 0", f"layer {run.geometry.num_layers - 1}"], loc="lower left")


def _frontier(curve: Curve) -> list[tuple[float, float]]:
    """(share of the dense numbers, loss) of the points that no smaller one undercuts; the dense one is the last."""
    found: list[tuple[float, float]] = []
    for numbers, loss in sorted(zip(curve.numbers, curve.loss, strict=True)):
        if not found or loss < found[-1][1]:
            found.append((numbers / curve.numbers[-1], loss))
    return found


def chosen_point(run: Run, task: str) -> int | None:
    """The place in a task's curve of the ranks that were chosen; None before they are, or if it has no such point."""
    ranks, curve = run.ranks.get(task), run.curves[task]
    places = range(len(curve.numbers))
    if ranks is None:
        return None
    return next((at for at in places if all(curve.ranks[name][at] == rank for name, rank in ranks.items())), None)


def _predicted_loss(run: Run) -> Plot | None:
    chosen = {task: place for task in run.curves if (place := chosen_point(run, task)) is not None}
    if not chosen:
        return None
    groups = sorted({read_task_key(task).group for task in chosen})
    layers = sorted({read_task_key(task).layer for task in chosen})

    def plot(axes: Axes) -> None:
        below = [0.0] * len(layers)
        for place, group in enumerate(groups):
            loss = dict.fromkeys(layers, 0.0)
            for task, point in chosen.items():
                if read_task_key(task).group == group:
                    loss[read_task_key(task).layer] += run.curves[task].loss[point]
            axes.bar(layers, list(loss.values()), bottom=below, color=SERIES[place % len(SERIES)], label=group)
            below = [under + loss[layer] for under, layer in zip(below, layers, strict=True)]
        by_layer(axes, run.geometry.num_layers, "nats per token")
        axes.set_title("predicted loss by layer")
        legend_below(axes, 4)

    told = "Predicted loss of what was chosen, by layer and group: where the budget was taken from."
    return Plot("curves", draw("predicted-loss", plot, height_inches=3.1), told)


def _errors(run: Run) -> Plot | None:
    found = _figures(run, "error")
    if not any(value > 0 for values in found.values() for value in values.values()):
        return None
    told = "Relative squared error of each group where it is made, 1 less the kept energy; none at full rank."
    return Plot("errors", _lines(run, "errors", "relative squared error", found), told)


def _conditions(run: Run) -> Plot | None:
    found = _figures(run, "condition")
    if not found:
        return None
    told = "Condition number of what was solved for each group; fallbacks are in the table."
    return Plot("errors", _lines(run, "conditions", "condition number", found), told)


def _spectra(run: Run) -> list[Plot]:
    found: dict[str, dict[int, tuple[Sequence[float], float]]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, report in entry.groups.items():
            told = report.as_json()
            for name in sorted(name for name in told if name.endswith("spectrum")):
                error = told.get(name.removesuffix("spectrum") + "error", 0.0)
                line = f"{group}: {name.removesuffix('_spectrum')}" if name != "spectrum" else group
                found.setdefault(line, {})[layer] = (told[name], error)
    return [_spectrum_plot(run, line, values) for line, values in found.items()]


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
                axes.plot((at - 1 + part) / steps, error, MARKERS[0], color=colour)
        _by_depth(axes, run, "share of the full rank", "energy beyond it")
        axes.set_title(f"spectrum of {line}")

    told = f"Share of the energy of {line} that stands beyond a rank, a line for each layer; a dot is what was chosen."
    return Plot("errors", draw(f"spectrum-{line.replace(': ', '-')}", plot), told)


def _figures(run: Run, ending: str) -> dict[str, dict[int, float]]:
    """`group` or `group: figure` -> layer -> value, of every figure of the reports whose name ends so."""
    found: dict[str, dict[int, float]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, report in entry.groups.items():
            for name, value in sorted(report.as_json().items()):
                if name.endswith(ending) and isinstance(value, float):
                    line = group if name == ending else f"{group}: {name.removesuffix(ending).strip('_')}"
                    found.setdefault(line, {})[layer] = value
    return found


def _lines(run: Run, name: str, label: str, found: Mapping[str, Mapping[int, float]]) -> str:
    def plot(axes: Axes) -> None:
        for place, (line, values) in enumerate(found.items()):
            shown = {layer: value for layer, value in values.items() if value > 0}
            (drawn,) = axes.plot(list(shown), list(shown.values()), label=line, color=SERIES[place % len(SERIES)])
            drawn.set(linestyle=DASHES[place % len(DASHES)], marker=MARKERS[place % len(MARKERS)])
        axes.set_yscale("log")
        by_layer(axes, run.geometry.num_layers, label)
        axes.set_title(label)
        legend_below(axes, 3)

    return draw(name, plot, height_inches=3.1)


def _colour(group: str, place: int) -> str:
    return GRID if group == "rest" else SERIES[place % len(SERIES)]
