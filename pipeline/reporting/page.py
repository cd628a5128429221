"""The page of a report: one HTML file that needs nothing else, on screen or paper, light or dark, wide or narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import PurePosixPath

from pipeline.evaluation.losses import damage_warnings, shown_perplexity
from pipeline.methods.registry import layers_of
from pipeline.reporting import tables
from pipeline.reporting.drawing import Plot
from pipeline.reporting.figures import all_plots, chosen_point
from pipeline.reporting.run_data import Run
from pipeline.reporting.style import STYLE

STATES = {
    "running": "running",
    "done": "done",
    "interrupted": "interrupted: run the same command again to go on",
    "failed": "failed",
    "stopped": "stopped without a word, as by a kill: run the same command again to go on",
}


def render(run: Run) -> str:
    """The whole file. The same run gives the same bytes, but for the versions of what renders it."""
    plots = all_plots(run)
    sections = [
        section("What is kept", tables.kept(run), tables.scores(run)),
        section("Ranks", figures(plots, "ranks")),
        section("Loss curves", figures(plots, "curves"), _folded("Chosen points", tables.predictions(run))),
        section("Errors and conditions", figures(plots, "errors"), _folded("All layers", tables.layers(run))),
        section(
            "Time",
            figures(plots, "time"),
            _side_by_side(tables.seconds(run), tables.units(run), tables.peaks(run)),
        ),
        section("Plan and measurement", tables.plan_and_measurement(run)),
        section(
            "What it was made of",
            tables.versions(run),
            _folded("Manifest", f"<pre>{escape(run.manifest_text)}</pre>"),
            _folded("Digests", tables.digests(run)),
        ),
        section("Log", _log(run)),
    ]
    return document(f"{PurePosixPath(run.path).name}: {run.state}", _head(run), sections)


def document(title: str, head: str, sections: Sequence[str]) -> str:
    """An HTML file. `title` is escaped here, the rest is HTML."""
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{STYLE}</style></head>\n<body><main>\n{head}\n{''.join(sections)}</main></body></html>\n"
    )


def _head(run: Run) -> str:
    methods = ", ".join(entry.method for entry in run.manifest.methods)
    told = [f'<p class="state {run.state}">{escape(STATES.get(run.state, run.state))}</p>']
    if run.ended and run.ended.get("error"):
        where = f" ({run.ended['where']})" if run.ended.get("where") else ""
        code = f"exit code {run.ended['exit_code']}"
        told.append(f"<p class=error><b>{code}</b>{escape(where)}: {escape(str(run.ended['error']))}</p>")
    told += [f"<p class=error><b>{escape(warning)}</b></p>" for warning in damage_warnings(run.summary or {})]
    facts = [
        ("layers compressed", f"{len(run.layers)} of {len(layers_of(run.tasks))}"),
        *_facts(run),
    ]
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    paths = f"{run.manifest.model.source} → {run.manifest.output}"
    return (
        f"<header><h1>{escape(PurePosixPath(run.path).name)}</h1><p>{escape(methods)}: <code>{escape(paths)}</code></p>"
        f"{''.join(told)}<dl>{cards}</dl></header>"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """The few figures that matter most, of a job that is done."""
    chosen = [run.curves[task].loss[place] for task in run.curves if (place := chosen_point(run, task)) is not None]
    predicted = [("predicted loss, nats per token", f"{math.fsum(chosen):.4g}")] if chosen else []
    if not run.summary:
        return predicted
    counts, scores = run.summary["counts"], run.summary.get("evaluation", {})
    shares = {name: pair["compressed"] / pair["dense"] for name, pair in counts.items() if pair["dense"]}
    wanted = {
        "decoder_parameters": "decoder numbers kept",
        "bytes": "bytes kept",
        "cache_bytes_per_token": "cache kept",
    }
    facts = [(told, f"{shares[name]:.2%}") for name, told in wanted.items() if name in shares]
    if "perplexity" in scores:
        facts.append(("perplexity", shown_perplexity(scores["perplexity"]["perplexity"])))
    return [*facts, *predicted, ("time", f"{run.summary['seconds']['total']:,.0f} s")]


def section(title: str, *parts: str) -> str:
    """What has content, under a heading; nothing where nothing has."""
    content = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>\n" if content else ""


def figures(plots: Sequence[Plot], section: str) -> str:
    """The plots of a section, with captions."""
    found = "\n".join(
        f'<figure role="img" aria-label="{escape(plot.caption)}">{plot.svg}<figcaption>{escape(plot.caption)}'
        "</figcaption></figure>"
        for plot in plots
        if plot.section == section
    )
    return f"<div class=plots>{found}</div>" if found else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _side_by_side(*parts: str) -> str:
    content = "".join(part for part in parts if part)
    return f"<div class=beside>{content}</div>" if content else ""


def _log(run: Run) -> str:
    return f"<pre>{escape(chr(10).join(run.log))}</pre>" if run.log else ""
