"""The summary at the end of a job, in a narrow and in a wide terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pipeline.reporting.summary import layer_tables, print_summary, score_lines

SCORE = {"perplexity": 12.5, "tokens": 4000, "window": 128, "text": {"files": ["/data/wiki.txt"]}, "seen": 0.0}


def layer(mlp_error: float, **notes: Any) -> dict[str, Any]:
    quiet = {"dropped": 0, "fallback": False, "jitter": 0.0}
    return {
        "groups": {
            "attention": {"ranks": {"value": 41}, "error": 0.0123, "method": "flat_llm"},
            "mlp": {"ranks": {"mlp": 5632}, "error": mlp_error, **quiet, **notes},
        },
        "forms": {},
    }


def shown(layers: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in layer_tables(layers, width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_a_row_for_each_layer_with_the_same_right_aligned_figures(width: int) -> None:
    lines = shown([layer(0.5), layer(0.00321)], width).splitlines()
    rows = [line for line in lines if line.strip()[:1].isdigit()]
    assert [row.split() for row in rows] == [
        ["0", "41", "0.0123", "5,632", "0.5"],
        ["1", "41", "0.0123", "5,632", "0.00321"],
    ]
    assert len({len(row.rstrip()) for row in rows}) == 1  # the last digits are below each other
    assert "notes" not in "".join(lines)
    assert all(len(line) <= width for line in lines)


def test_a_refinement_has_columns_of_its_own() -> None:
    figures = {"before": 0.5, "after": 0.25, "train_before": 0.4, "train_after": 0.125, "steps": 180}
    refined = {**figures, "steps_done": 200, "learning_rate": 1e-3, "kept": True, "held_out": 6, "samples": 58}
    text = shown([layer(0.5), {**layer(0.1), "refined": refined}], 200)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "41", "0.0123", "5,632", "0.5"],
        ["1", "41", "0.0123", "5,632", "0.1", "0.5", "0.25", "0.4", "0.125", "0.001", "180", "yes"],
    ]


def test_only_what_is_out_of_the_ordinary_is_noted() -> None:
    text = shown([layer(0.5), layer(0.1, fallback=True), layer(0.1, dropped=3)], 100)
    rows = [line for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert "fallback" not in rows[0] + rows[2]
    assert rows[1].rstrip().endswith("mlp fallback")
    assert rows[2].rstrip().endswith("mlp dropped 3")
    assert "False" not in text
    assert "jitter" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_more_figures_than_the_width_holds_make_a_second_table(width: int) -> None:
    groups = {
        f"group_{number}": {"ranks": {"first": 1000 + number, "second": 2000 + number}, "error": number / 7}
        for number in range(6)
    }
    text = shown([{"groups": groups}, {"groups": {**groups, "group_5": {"ranks": {}, "dense": True}}}], width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for number in range(6):
        assert text.count(f"{1000 + number:,}") == (2 if number < 5 else 1)
    assert text.count("group_5 dense") == 1


def test_tucker_ranks_are_one_figure() -> None:
    text = shown([{"groups": {"attention": {"ranks": {}, "tucker_ranks": [8, 16, 48], "error": 0.25}}}], 80)
    assert "8×16×48" in text


def test_scores_beside_the_dense_model() -> None:
    dense = {**SCORE, "perplexity": 10.0}
    assert list(score_lines({"perplexity": SCORE})) == ["perplexity 12.5000 (wiki.txt, 4,000 tokens, windows of 128)"]
    assert "dense 10.0000, 1.250 times" in next(score_lines({"perplexity": SCORE, "dense": dense}))
    lines = list(score_lines({"perplexity": {**SCORE, "seen": 0.4}, "earlier": [dense]}))
    assert "40% of the evaluation text occurs in the calibration samples" in lines[1]
    assert lines[2].startswith("earlier: perplexity 10.0000")
    assert list(score_lines({})) == []


def test_settings_of_tasks_stand_below_their_scores() -> None:
    tasks = {"dense": {"arc": {"documents": 5, "metrics": {"acc": {"value": 0.5, "stderr": None}}}}}
    plain = list(score_lines({"tasks": tasks}))
    assert plain[-1].startswith("arc")
    settings = {"limit": 5, "fewshot": 0, "chat_template": True}
    assert list(score_lines({"tasks": tasks, "task_settings": settings})) == [
        *plain,
        "tasks: the first 5 documents of each task, 0-shot, chat template",
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_whole_summary_fits_a_terminal(width: int) -> None:
    summary = {
        "output": "/checkpoints/small",
        "layers": [layer(0.5)] * 3,
        "counts": {"parameters": {"dense": 68_976_648_192, "compressed": 55_181_318_552}},
        "seconds": {"total": 3.0, "phases": {"compress": 2.0}, "units": {"solve": [3, 2.0, 1.0]}},
        "peak_bytes": {"driver": 2**30, "workers": {"one": 2**31}},
        "evaluation": {"perplexity": SCORE},
    }
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()
    assert max(len(line) for line in console.file.getvalue().splitlines()) <= width
    text = console.file.getvalue() if width > 40 else " ".join(console.file.getvalue().split())
    if width > 40:
        assert "68,976,648,192  55,181,318,552  0.8000" in text
    assert all(figure in text for figure in ("68,976,648,192", "55,181,318,552", "0.8000"))
    text = " ".join(text.split())
    assert "workers inside products and decompositions: 50%" in text
    assert "output: /checkpoints/small" in text
