"""The data of figures by layer: ranks, sizes, loss curves, errors, spectra."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manifests.records import Curve
from pipeline.console.expert_groups import EXPERTS, expert_number, split_experts
from pipeline.methods.method import read_task_key, task_key
from pipeline.methods.registry import build_methods
from pipeline.reporting.run_data import Data, Run, single

MEBI = 2**20
Point = tuple[float, float]


class Stacks(NamedTuple):
    """Group -> its height in each of the layers; and the height of a dense layer, if there is one to compare with."""

    layers: Sequence[int]
    heights: Mapping[str, Sequence[float]]
    dense: float | None = None


class DepthLine(NamedTuple):
    """The line of a layer, and the point that was chosen, if it can be shown."""

    points: Sequence[Point]
    chosen: Point | None


def ranks(run: Run) -> Data[tuple[dict[int, int], list[int | None]]]:
    """Return, for every rank that a method chooses outside of experts, layer -> rank, and the known full ranks."""
    chosen: dict[tuple[int, str, str], dict[int, int]] = {}
    for task, by_name in run.ranks.items():
        layer, method, group = read_task_key(task)
        for name, rank in by_name.items() if expert_number(group) is None else ():
            chosen.setdefault((method, group, name), {})[layer] = rank
    data: Data[tuple[dict[int, int], list[int | None]]] = []
    for (method, group, name), by_layer in chosen.items():
        full = [run.caps.get((task_key(layer, method, group), name)) for layer in sorted(by_layer)]
        line = group if name == group else f"{group}: {name}"
        data.append(((by_layer, full), {"rank": line, "method": build_methods(run.manifest)[int(method)].name}))
    return data


def stored(run: Run) -> Data[Stacks]:
    """Return the MiB that each compressed layer stores."""
    sizes = [(layer, group, size / MEBI) for layer in run.layers for group, size in run.stored_bytes(layer).items()]
    return _stacks(sizes, run.plan.layer_bytes / MEBI) if sizes else []


def predicted_loss(run: Run) -> Data[Stacks]:
    """Return the predicted loss of the chosen sizes."""
    tasks = [(read_task_key(task), loss) for task, loss in run.chosen_losses.items()]
    return _stacks([(task.layer, task.group, loss) for task, loss in tasks])


def _stacks(heights: Iterable[tuple[int, str, float]], dense: float | None = None) -> Data[Stacks]:
    """Add the heights of each layer and group; all experts are one group. `rest` is the last group."""
    sums: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for layer, group, height in heights:
        sums[group if expert_number(group) is None else EXPERTS][layer] += height
    layers = sorted({layer for by_layer in sums.values() for layer in by_layer})
    groups = sorted(sums, key=lambda group: (group == "rest", group))
    stacks = Stacks(layers, {group: [sums[group][layer] for layer in layers] for group in groups}, dense)
    return single(stacks) if layers else []


def curves(run: Run) -> Data[dict[int, DepthLine]]:
    """Return the predicted losses of each group outside of experts, by the share of numbers stored."""
    groups: defaultdict[str, dict[int, DepthLine]] = defaultdict(dict)
    for task, curve in run.curves.items():
        layer, _, group = read_task_key(task)
        if expert_number(group) is None:
            place = run.chosen_points.get(task)
            loss = 0.0 if place is None else curve.loss[place]
            chosen = None if place is None or not loss else (curve.numbers[place] / curve.numbers[-1], loss)
            groups[group][layer] = DepthLine([point for point in frontier(curve) if point[1]], chosen)
    return [(dict(sorted(lines.items())), {"group": group}) for group, lines in groups.items()]


def frontier(curve: Curve) -> list[Point]:
    """Return (share of the dense numbers, loss) of the points with less loss than every smaller point."""
    points: list[Point] = []
    for numbers, loss in sorted(zip(curve.numbers, curve.loss, strict=True)):
        if not points or loss < points[-1][1]:
            points.append((numbers / curve.numbers[-1], loss))
    return points


def spectra(run: Run) -> Data[dict[int, DepthLine]]:
    """Return the energy of each group beyond a rank, by the share of the full rank."""
    lines: dict[str, dict[int, DepthLine]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, group_report in split_experts(entry.groups)[0].items():
            report = group_report.as_json()
            for name in sorted(name for name in report if name.endswith("spectrum")):
                error = report.get(name.removesuffix("spectrum") + "error", 0.0)
                line = f"{group}: {name.removesuffix('_spectrum')}" if name != "spectrum" else group
                lines.setdefault(line, {})[layer] = _spectrum(report[name], error)
    return [(by_layer, {"line": line}) for line, by_layer in lines.items()]


def _spectrum(beyond: Sequence[float], error: float) -> DepthLine:
    """`beyond`: the energy beyond each rank; the chosen point lies where that is the error."""
    steps = len(beyond) - 1
    points = [(step / steps, share) for step, share in enumerate(beyond) if share > 0]
    if error <= 0:
        return DepthLine(points, None)
    at = next(step for step, share in enumerate(beyond) if share <= error)
    before, after = beyond[max(0, at - 1)], beyond[at]
    part = (before - error) / (before - after) if before > after else 0.0
    return DepthLine(points, (max(0.0, at - 1 + part) / steps, error))


def reported(suffix: str, run: Run) -> Data[dict[str, dict[int, float]]]:
    """Return `group` or `group: figure` -> layer -> value, of the reported figures whose name has this suffix."""
    lines: dict[str, dict[int, float]] = {}
    for layer, entry in sorted(run.layers.items()):
        for group, report in split_experts(entry.groups)[0].items():
            for name, value in sorted(report.as_json().items()):
                if name.endswith(suffix) and isinstance(value, float):
                    line = group if name == suffix else f"{group}: {name.removesuffix(suffix).strip('_')}"
                    lines.setdefault(line, {})[layer] = value
    return single(lines) if any(value > 0 for by_layer in lines.values() for value in by_layer.values()) else []


def refinement(run: Run) -> Data[dict[str, dict[int, float]]]:
    """Return the errors of refined layers before and after, on held-out and on training samples."""
    refined = {layer: entry.refined for layer, entry in sorted(run.layers.items()) if entry.refined is not None}
    lines = {
        "held-out, before": {layer: figures.before for layer, figures in refined.items()},
        "held-out, after": {layer: figures.after for layer, figures in refined.items()},
        "training, before": {layer: figures.train_before for layer, figures in refined.items()},
        "training, after": {layer: figures.train_after for layer, figures in refined.items()},
    }
    return single(lines) if refined else []
