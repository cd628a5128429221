"""Prints the summary of a finished job: ranks and errors by layer, sizes, scores, and time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.console.expert_groups import EXPERTS, extent, named, split_experts
from pipeline.console.printing import as_called, wrapped
from pipeline.evaluation.losses import all_warnings, score_extent, shown_perplexity, texts_line
from pipeline.evaluation.task_scores import read_scores, shown_settings, task_lines
from pipeline.evaluation.text_remarks import read_lines
from pipeline.ranks.search import CLOSE, WHOLE

SEEN_LIMIT = 0.1  # share of passages in both texts; unrelated texts share less
FIGURES = re.compile(r".*error.*|tucker_ranks.*|numbers|predicted.*")  # fields of a group's report in the table
NOTES = re.compile(r"(fallback|dropped|clipped|jitter|selection_jitter|scaled|dense|repaired|unseen|few_tokens).*")
NOTES_WIDTH = 24  # least characters of the column of notes
UNBOUNDED = 1000  # console width at which a table shows its natural width
GAP = 2  # characters between columns, the table's divider among them


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the summary to the terminal, or to another console."""
    console = console or Console()

    def say(line: str, style: str | None = None) -> None:
        line = as_called(line)
        line = wrapped(line, console.width) if console.is_terminal else line
        # A path stays one word on one line.
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    if summary.get("already_finished"):
        nothing = "nothing to do (`python -m pipeline.verify` reads every byte)"
        say(f"{summary['output']}: finished before; {'scored now' if summary.get('scored_now') else nothing}")
    for table in layer_tables(summary["layers"], console.width):
        console.print(table)
        console.print()
    _say_counts(summary["counts"], console, say)
    say(_time_line(summary["seconds"]))
    say(_memory_line(summary["peak_bytes"]))
    if samples := summary.get("samples"):
        say(samples_line(samples))
    for line in read_lines(summary):
        say(line)
    if texts := summary.get("texts"):
        say(texts_line(texts))
    if healed := summary.get("healed"):
        say(healed_line(healed))
    if held_out := summary.get("held_out"):
        say(held_out_line(held_out))
    for entry in summary.get("tries", ()):
        say(f"  tried keep {entry['keep']:g}: divergence {entry['divergence']:.3g}, predicted {entry['predicted']:.3g}")
    if summary.get("tries"):
        say(f"  the smallest keep within the limit, to within {CLOSE / WHOLE:g}")
    for line in prediction_lines(summary.get("prediction")):
        say(line)
    for line in score_lines(summary["evaluation"]):
        say(line)
    say(f"output: {summary['output']}")
    for warning in all_warnings(summary):
        say(warning, style="bold red")


def samples_line(entered: Mapping[str, Any]) -> str:
    """Return a line with the chosen number of calibration samples, and the gain of more text."""
    (_, half, whole), most = entered["errors"], entered["counts"][-1]
    # The excess of the error falls as 1 / samples, so that it was twice as large with half of them.
    more = max(0.0, half - whole) / 2 / whole if whole else 0.0
    return (
        f"calibration.samples: auto: {entered['samples']} of {most}; twice as much text as the {most} would lower the "
        f"error on held-out text by {more:.1%}"
    )


def healed_line(figures: Mapping[str, Any]) -> str:
    """Return a line about a healing, from its figures. Without a best step the layers are those of the solve."""
    trained = f"{figures['steps']} steps on {figures['tokens']:,} tokens"
    if not figures["best_step"]:
        return (
            f"not healed: of {trained}, none lowered the divergence on held-out text, {figures['before']:.4f}; OUTPUT "
            "is that of the solve"
        )
    return (
        f"healed: {trained}, best after step {figures['best_step']}; "
        f"divergence on held-out text {figures['before']:.4f} before, {figures['after']:.4f} after"
    )


def held_out_line(held_out: Mapping[str, Any]) -> str:
    """Return a line with the scores on held-out calibration text."""
    return (
        f"held-out calibration text: perplexity {_perplexity(held_out)}, "
        f"dense {shown_perplexity(held_out['dense_perplexity'], held_out.get('dense_loss'))}; "
        f"divergence {held_out['divergence']:.3g} nats per token ({held_out['tokens']:,} tokens)"
    )


def prediction_lines(prediction: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield lines with the predicted and the measured loss, and the expected losses of other sizes."""
    if prediction is None:
        return
    yield (
        f"loss in nats per token: predicted {prediction['predicted']:.3g}, measured {prediction['measured']:.3g} as "
        "the divergence above"
    )
    if sizes := prediction.get("sizes"):
        expected = ", ".join(f"keep {entry['keep']:g}: {entry['expected']:.3g}" for entry in sizes)
        yield f"  expected at other sizes, by the measured ones: {expected}"


def seen_warning(share: float) -> str:
    """Return a warning that a share of the evaluation text is also in the calibration samples."""
    return f"{share:.0%} of the evaluation text occurs in the calibration samples, which flatters; score another text"


def score_lines(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the perplexities, with the dense model's if it was scored, and the scores of tasks."""
    compressed, dense = evaluation.get("perplexity"), evaluation.get("dense")
    if compressed:
        ratio = _versus_dense(compressed, dense) if dense else ""
        yield f"perplexity {_perplexity(compressed)}{ratio} ({_extent(compressed)})"
        if compressed.get("seen", 0.0) > SEEN_LIMIT:
            yield f"  {seen_warning(compressed['seen'])}"
    if evaluation.get("tasks"):
        yield from task_lines({model: read_scores(scores) for model, scores in evaluation["tasks"].items()})
    yield from settings_lines(evaluation)
    for entry in evaluation.get("earlier", ()):
        yield f"earlier: perplexity {_perplexity(entry)} ({_extent(entry)})"


def settings_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """Return a line with the settings of scored tasks; none for the defaults."""
    settings = evaluation.get("task_settings")
    return [f"tasks: {shown_settings(settings)}"] if evaluation.get("tasks") and settings else []


def _perplexity(score: Mapping[str, Any]) -> str:
    return shown_perplexity(score["perplexity"], score.get("loss"))


def _versus_dense(compressed: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Return the dense model's perplexity, and the ratio if both are finite."""
    ratio = float(compressed["perplexity"]) / float(dense["perplexity"])
    return f", dense {_perplexity(dense)}{f', {ratio:.3f} times' if math.isfinite(ratio) else ''}"


def compute_share(seconds: Mapping[str, Any]) -> float:
    """Return the share of the workers' busy time that they spend in matrix products and decompositions."""
    units = seconds["units"].values()
    busy = sum(spent for _, spent, _ in units)
    return sum(computing for _, _, computing in units) / busy if busy else 0.0


def layer_tables(layers: Sequence[Mapping[str, Any]], width: int) -> list[Table]:
    """Build tables with a row for each layer, as many as the width needs. Notes, if any, are in the last one."""
    rows = [dict(_figures(entry["groups"])) | refined_cells(entry.get("refined")) for entry in layers]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    notes = [", ".join(_notes(entry["groups"])) for entry in layers]
    widths = {heading: GAP + max(map(len, [*heading, *(row.get(heading, "") for row in rows)])) for heading in headings}
    room = width - GAP - len("layer")
    parts: list[list[tuple[str, str]]] = [[]]
    for heading in headings:
        if parts[-1] and sum(widths[column] for column in parts[-1]) + widths[heading] > room:
            parts.append([])
        parts[-1].append(heading)
    if any(notes) and parts[-1] and sum(widths[column] for column in parts[-1]) + NOTES_WIDTH > room:
        parts.append([])
    tables = [_table(["layer", *(f"{group}\n{name}" if name else group for group, name in part)]) for part in parts]
    if any(notes):
        tables[-1].add_column("notes", overflow="fold")
    for table, part in zip(tables, parts, strict=True):
        for layer, row in enumerate(rows):
            last = [notes[layer]] if any(notes) and table is tables[-1] else []
            table.add_row(str(layer), *(row.get(heading, "") for heading in part), *last)
    return tables


def refined_cells(refined: Mapping[str, Any] | None) -> dict[tuple[str, str], str]:
    """Map headings to the cells of a layer's refinement: errors on held-out and on training samples, before and after.

    Empty without one.
    """
    if refined is None:
        return {}
    figures = {
        "held-out before": _short(refined["before"]),
        "held-out after": _short(refined["after"]),
        "training before": _short(refined["train_before"]),
        "training after": _short(refined["train_after"]),
        "rate": f"{refined['learning_rate']:.2g}",
        "steps": str(refined["steps"]),
        "kept": "yes" if refined["kept"] else "no",
    }
    return {("refined", name): cell for name, cell in figures.items()}


def _figures(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((group, figure), cell) of a layer."""
    others, experts = split_experts(groups)
    for group, report in others.items():
        for name, rank in report["ranks"].items():
            yield (group, "rank" if name == group else name), f"{rank:,}"
        for name, value in sorted(report.items()):
            if value is not None and FIGURES.fullmatch(name):
                yield (group, name.replace("_", " ")), _short(value)
    reports = [report for each in experts.values() for report in each]
    for name in dict.fromkeys(name for report in reports for name in report["ranks"]):
        yield (EXPERTS, name), extent(report["ranks"][name] for report in reports if name in report["ranks"])
    for name in sorted({name for report in reports for name in report if FIGURES.fullmatch(name)}):
        values = [value for report in reports if isinstance(value := report.get(name), int | float)]
        if values:
            yield (EXPERTS, name.replace("_", " ")), extent(values, ".3g")


def _notes(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the unusual events of a layer's solves."""
    others, experts = split_experts(groups)
    noted: dict[str, list[int]] = {}
    for number, reports in experts.items():
        for name in {name for report in reports for name, value in report.items() if NOTES.fullmatch(name) and value}:
            noted.setdefault(name, []).append(number)
    for name, numbers in sorted(noted.items()):
        yield f"experts {named(numbers)}: {name.replace('_', ' ')}"
    for group, report in others.items():
        for name, value in sorted(report.items()):
            if NOTES.fullmatch(name) and value:
                yield f"{group} {name.replace('_', ' ')}{'' if value is True else f' {_short(value)}'}"


def _say_counts(counts: Mapping[str, Mapping[str, int]], console: Console, say: Callable[[str], None]) -> None:
    """Print a table, or lines if the table is wider than the console."""
    table = _table(["", "dense", "compressed", "kept"])
    table.columns[0].justify = "left"
    for name, pair in counts.items():
        table.add_row(name.replace("_", " "), f"{pair['dense']:,}", f"{pair['compressed']:,}", f"{_kept(pair):.4f}")
    if console.measure(table, options=console.options.update(max_width=UNBOUNDED)).maximum <= console.width:
        console.print(table)
    else:
        for name, pair in counts.items():
            figures = f"{pair['dense']:,} dense, {pair['compressed']:,} compressed, {_kept(pair):.4f} kept"
            say(f"{name.replace('_', ' ')}: {figures}")
    console.print()


def _kept(pair: Mapping[str, int]) -> float:
    return pair["compressed"] / pair["dense"] if pair["dense"] else 1.0


def _table(headings: Sequence[str]) -> Table:
    """Return an empty table of numbers, right-aligned and never cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _extent(entry: Mapping[str, Any]) -> str:
    text = entry.get("text", {})
    name = text.get("dataset") or ", ".join(Path(file).name for file in text.get("files", ()))
    return f"{f'{name}, ' if name else ''}{score_extent(entry)}"


def _time_line(seconds: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds["phases"].items())
    time = f"time: {seconds['total']:.1f} s ({phases})"
    if not seconds["units"]:
        return time  # all units were done in an earlier run
    return f"{time}; workers inside products and decompositions: {compute_share(seconds):.0%}"


def _memory_line(peaks: Mapping[str, Any]) -> str:
    driver = f"peak memory in MiB: driver {peaks['driver'] / 2**20:,.0f}"
    workers = ", ".join(f"{peak / 2**20:,.0f}" for peak in peaks["workers"].values())
    return f"{driver}; workers {workers}" if workers else driver


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "×".join(map(_short, value))
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
