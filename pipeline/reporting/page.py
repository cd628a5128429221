"""The page of a report: one HTML file without external resources, for screens of any width and for paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import PurePosixPath

from pipeline.evaluation.losses import all_warnings, shown_perplexity
from pipeline.methods.registry import layers_of
from pipeline.reporting import tables
from pipeline.reporting.drawing import Plot
from pipeline.reporting.figures import chosen_point, plots_of
from pipeline.reporting.run_data import Run
from pipeline.reporting.style import STYLE

STATES = {
    "interrupted": "interrupted: run the same command again to resume",
    "stopped": "stopped without a message, perhaps killed: run the same command again to resume",
}
KEPT = {
    "decoder_parameters": "decoder numbers kept",
    "bytes": "bytes kept",
    "cache_bytes_per_token": "cache kept",
}


def render(run: Run) -> str:
    """Render the whole file. The same run gives the same bytes with the same versions of the libraries."""
    log = f"<pre>{escape(chr(10).join(run.log))}</pre>" if run.log else ""
    sections = [
        section("What is kept", tables.kept(run), tables.scores(run), tables.texts(run)),
        _section_with_plots(run, "Ranks"),
        _section_with_plots(
            run, "Loss curves", tables.expected(run), _folded("Chosen points", tables.predictions(run))
        ),
        _section_with_plots(
            run,
            "Errors and conditions",
            _folded("Refinement", tables.refinement(run)),
            _folded("All layers", tables.layers(run)),
        ),
        _section_with_plots(run, "Time", _block("beside", (tables.seconds(run), tables.units(run), tables.peaks(run)))),
        section("Plan and measurement", tables.plan_and_measurement(run)),
        section(
            "Provenance",
            tables.versions(run),
            _folded("Manifest", f"<pre>{escape(run.manifest_text)}</pre>"),
            _folded("Digests", tables.digests(run)),
        ),
        section("Log", log),
    ]
    return document(f"{PurePosixPath(run.path).name}: {run.state}", _head(run), sections)


def document(title: str, head: str, sections: Sequence[str]) -> str:
    """Build an HTML file. `title` is escaped here; the rest is HTML."""
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{STYLE}</style></head>\n<body><main>\n{head}\n{''.join(sections)}</main></body></html>\n"
    )


def warning_lines(warnings: Iterable[str]) -> str:
    """Render each warning as a paragraph in bold."""
    return "".join(f"<p class=error><b>{escape(warning)}</b></p>" for warning in warnings)


def _head(run: Run) -> str:
    methods = ", ".join(entry.method for entry in run.manifest.methods)
    lines = f'<p class="state {run.state}">{escape(STATES.get(run.state, run.state))}</p>'
    if run.ended and run.ended.get("error"):
        where = f" ({run.ended['where']})" if run.ended.get("where") else ""
        code = f"exit code {run.ended['exit_code']}"
        lines += f"<p class=error><b>{code}</b>{escape(where)}: {escape(str(run.ended['error']))}</p>"
    lines += warning_lines(all_warnings(run.summary or {}))
    facts = [("layers compressed", f"{len(run.layers)} of {len(layers_of(run.tasks))}"), *_facts(run)]
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    paths = f"{run.manifest.model.source} → {run.manifest.output}"
    return (
        f"<header><h1>{escape(PurePosixPath(run.path).name)}</h1><p>{escape(methods)}: <code>{escape(paths)}</code></p>"
        f"{lines}<dl>{cards}</dl></header>"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return the most important figures: shares kept, perplexity and time once the job is done."""
    chosen = [run.curves[task].loss[point] for task in run.curves if (point := chosen_point(run, task)) is not None]
    predicted = [("predicted loss, nats per token", f"{math.fsum(chosen):.4g}")] if chosen else []
    if not run.summary:
        return predicted
    counts, scores = run.summary["counts"], run.summary.get("evaluation", {})
    shares = {name: pair["compressed"] / pair["dense"] for name, pair in counts.items() if pair["dense"]}
    facts = [(label, f"{shares[name]:.2%}") for name, label in KEPT.items() if name in shares]
    if "perplexity" in scores:
        facts.append(("perplexity", shown_perplexity(scores["perplexity"]["perplexity"])))
    if prediction := run.summary.get("prediction"):
        predicted.append(("measured loss, nats per token", f"{prediction['measured']:.4g}"))
    if samples := run.summary.get("samples"):
        facts.append(("calibration samples chosen", f"{samples['samples']:,} of {samples['counts'][-1]:,}"))
    return [*facts, *predicted, ("time", f"{run.summary['seconds']['total']:,.0f} s")]


def section(title: str, *parts: str) -> str:
    """Put the non-empty parts under a heading. Return an empty string if all are empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>\n" if content else ""


def _section_with_plots(run: Run, title: str, *parts: str) -> str:
    return section(title, figures(plots_of(run, title)), *parts)


def figures(plots: Sequence[Plot]) -> str:
    """Render plots with their captions."""
    return _block(
        "plots",
        [
            f'<figure role="img" aria-label="{escape(plot.caption)}">{plot.svg}<figcaption>{escape(plot.caption)}'
            "</figcaption></figure>"
            for plot in plots
        ],
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _block(name: str, parts: Iterable[str]) -> str:
    content = "\n".join(part for part in parts if part)
    return f"<div class={name}>{content}</div>" if content else ""
