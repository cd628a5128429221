"""The figures of a run: the table, their data, and plots of it."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure as Drawing

from manifests.entries import HealingCurve
from manifests.records import Curve
from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT, SALIENCY_BY_EXPERT, TOKENS_BY_EXPERT
from pipeline.methods.text_sources import BY_SOURCE
from pipeline.reporting import layer_data, plots
from pipeline.reporting.expert_data import LEAST, by_expert, by_source
from pipeline.reporting.figures import FIGURES, draw_figures
from tests.families.geometries import llama
from tests.reporting.runs import MIXTURE, run_of

CURVE = Curve(ranks={"width": (1, 2, 3, 4)}, numbers=(20, 10, 30, 40), cache=(0, 0, 0, 0), loss=(0.3, 0.1, 0.2, 0.0))
SPECTRUM = [1.0, 0.5, 0.25, 0.0]
WIDTH, COUNT = MIXTURE.layers[0].mlps[0].width, MIXTURE.layers[0].num_experts
UNITS = [
    {"unit": "forward/0", "kind": "forward", "worker": "a", "ended": 5.0, "seconds": 4.0, "peak_bytes": 9, "tokens": 8},
    {"unit": "write/0", "kind": "write", "worker": "a", "ended": 6.0, "seconds": 1.0, "peak_bytes": 9, "tokens": 0},
]


def test_a_run_without_data_has_no_figures() -> None:
    assert not any(draw_figures(run_of()).values())


@pytest.mark.slow
def test_every_figure_is_drawn_where_its_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own title and caption; words in braces are filled."""
    sources = {name: [1] * COUNT for name in ("wiki {x}", "code")}
    scores = {TOKENS_BY_EXPERT: [3] * COUNT, REMOVAL_LOSS_BY_EXPERT: [0.5] * COUNT, SALIENCY_BY_EXPERT: [1.0] * COUNT}
    reports = {
        "query_key": {"error": 0.5, "condition": 9.0, "spectrum": SPECTRUM},
        "experts": {"ranks": {}, BY_SOURCE: sources, **scores},
    }
    tasks = ("0/0/query_key", "0/0/experts.1")
    run = run_of(
        {0: reports}, MIXTURE,
        ranks={task: {"width": 3} for task in tasks}, curves=dict.fromkeys(tasks, CURVE), importance={0: 1.0},
        healing=HealingCurve(steps=(0, 5), divergences=(0.5, 0.25), best=5), units=tuple(UNITS),
        commits=((3.0, "layer/00000"),), summary={"seconds": {"phases": {"compress": 2.0}}},
        refined={"before": 0.5, "after": 0.25, "train_before": 0.5, "train_after": 0.25},
    )  # fmt: skip
    monkeypatch.setattr(type(run), "stored_bytes", lambda *_: {"query_key": 5, "rest": 7})
    drawn = draw_figures(run)
    assert {section: len(drawn[section]) for section in FIGURES} == {
        section: len(figures) + (section == "Ranks") for section, figures in FIGURES.items()
    }  # a map for each of two sources
    captions = [plot.caption for each in drawn.values() for plot in each]
    assert len({*captions}) == len(captions)
    assert all(caption.endswith(".") for caption in captions)
    assert [caption for caption in captions if "{" in caption] == [
        f"Share of each expert's sampled tokens that come from wiki {{x}}; of all sampled tokens, 50% do. The experts "
        f"furthest from that: {', '.join(f'layer 0 expert {number} 50%' for number in range(5))}."
    ]


def test_ranks_and_known_full_ranks_in_the_order_of_layers() -> None:
    ranks = {"2/0/value_output": {"rank": 5}, "0/0/value_output": {"rank": 3}, "0/0/experts.1": {"width": 9}}
    caps = {("0/0/value_output", "rank"): 16, ("2/0/value_output", "rank"): 12}
    ((data, words),) = layer_data.ranks(run_of(ranks=ranks, caps=caps))  # ranks of experts are in a heat map
    assert data == ({0: 3, 2: 5}, [16, 12])
    assert words == {"rank": "value_output: rank", "method": "flat_llm"}
    for full, drawn in (([16, 12], [[16, 12], [3, 5]]), ([16, None], [[3, 5]])):
        axes = Drawing().add_subplot()
        plots.ranks(axes, (data[0], full), 6)
        assert [[*line.get_ydata()] for line in axes.lines] == drawn  # type: ignore[misc]
        assert axes.get_ylim() == (0, 1.08 * 16)


def test_a_curve_shows_its_frontier_and_the_chosen_point() -> None:
    assert layer_data.frontier(CURVE) == [(0.25, 0.1), (1.0, 0.0)]  # 20 and 30 numbers lose more than 10
    run = run_of(curves={"1/0/mlp": CURVE}, ranks={"1/0/mlp": {"width": 3}})
    assert run.chosen_points == {"1/0/mlp": 2}
    # A loss of 0 has no logarithm.
    assert layer_data.curves(run) == [({1: ([(0.25, 0.1)], (0.75, 0.2))}, {"group": "mlp"})]


@pytest.mark.parametrize("ranks", [{}, {"1/0/mlp": {"width": 5}}])
def test_ranks_that_are_not_on_the_curve(ranks: dict[str, dict[str, int]]) -> None:
    run = run_of(curves={"1/0/mlp": CURVE}, ranks=ranks)
    assert run.chosen_points == {}
    assert layer_data.predicted_loss(run) == []


def test_predicted_losses_are_stacked_by_group_and_experts_are_one() -> None:
    curves = {f"{layer}/0/{group}": CURVE for layer in (0, 4) for group in ("experts.0", "experts.1", "value_output")}
    ranks = {task: {"width": 1} for task in curves if task != "4/0/experts.1"}
    ((stacks, _),) = layer_data.predicted_loss(run_of(curves=curves, ranks=ranks))
    assert stacks == ([0, 4], {"experts": [0.6, 0.3], "value_output": [0.3, 0.3]}, None)
    axes = Drawing().add_subplot()
    plots.stacks(axes, stacks, 6)
    assert [[bar.get_y() for bar in bars] for bars in axes.containers] == [[0.0, 0.0], [0.6, 0.3]]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "place"),
    [(0.5, 1 / 3), (0.375, 0.5), (0.125, 2.5 / 3), (1.0, 0.0), (1.5, 0.0)],
    ids=["on a step", "between steps", "beyond the last", "nothing kept", "more than everything"],
)
def test_a_dot_lies_where_the_spectrum_has_the_error(error: float, place: float) -> None:
    ((lines, words),) = layer_data.spectra(run_of({0: {"query": {"spectrum": SPECTRUM, "error": error}}}))
    assert words == {"line": "query"}
    assert lines[0] == ([(0.0, 1.0), (1 / 3, 0.5), (2 / 3, 0.25)], (pytest.approx(place), error))


def test_spectra_of_several_matrices_and_of_zeros() -> None:
    report = {"up_spectrum": SPECTRUM, "up_error": 0.25, "gate_spectrum": [0.0, 0.0]}
    (gate, up) = layer_data.spectra(run_of({0: {"mlp": report}}))
    assert gate == ({0: ([], None)}, {"line": "mlp: gate"})
    assert up[0][0].chosen == (pytest.approx(2 / 3), 0.25)


def test_errors_of_each_figure() -> None:
    reports = {1: {"mlp": {"error": 0.5, "up_error": 0.0, "errors": [1.0], "experts": 3}}, 0: {"mlp": {"error": 0.25}}}
    ((lines, _),) = layer_data.reported("error", run_of(reports))
    assert lines == {"mlp": {0: 0.25, 1: 0.5}, "mlp: up": {1: 0.0}}
    axes = Drawing().add_subplot()
    plots.lines(axes, lines, 6)
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 0]  # type: ignore[arg-type]
    assert layer_data.reported("error", run_of({0: {"mlp": {"error": 0.0}}})) == []


def test_experts_by_themselves() -> None:
    groups = {f"experts.{number}": {"tokens": 10 * number, "ranks": {"width": WIDTH // 2}} for number in (0, 1)}
    curves = {f"1/0/experts.{number}": CURVE for number in (0, 1)}
    run = run_of(
        {1: groups}, MIXTURE, curves=curves, ranks={"1/0/experts.0": {"width": 4}, "1/0/experts.1": {"width": 1}}
    )
    assert by_expert("tokens", run) == [({(1, 0): 0.0, (1, 1): 10.0}, {})]
    assert by_expert("widths", run) == [({(1, 0): 0.5, (1, 1): 0.5}, {})]
    assert by_expert("losses", run) == [({(1, 0): LEAST, (1, 1): 0.3}, {})]


def test_experts_that_are_chosen_together() -> None:
    kept = [*range(1, COUNT)]
    scores = {TOKENS_BY_EXPERT: [*range(COUNT)], REMOVAL_LOSS_BY_EXPERT: [0.5] * COUNT}
    run = run_of({0: {"experts": {"experts": kept, "width": WIDTH // 4, "ranks": {}, **scores}}}, MIXTURE)
    widths = {(0, 0): 0.0, **{(0, number): (WIDTH // 4) / WIDTH for number in kept}}
    assert by_expert("widths", run) == [(widths, {})]
    assert by_expert("tokens", run) == [({(0, number): number for number in range(COUNT)}, {})]
    assert by_expert(REMOVAL_LOSS_BY_EXPERT, run) == [({(0, number): 0.5 for number in range(COUNT)}, {})]
    assert by_expert(SALIENCY_BY_EXPERT, run) == by_source(run) == []


def test_a_model_without_experts_has_no_map() -> None:
    run = run_of(
        {0: {"mlp": {"tokens": 5, "ranks": {"width": 3}}}},
        llama(),
        curves={"0/0/mlp": CURVE},
        ranks={"0/0/mlp": {"width": 1}},
    )
    assert not any(by_expert(quantity, run) for quantity in ("tokens", "widths", "losses"))
