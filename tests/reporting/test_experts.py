"""Heat maps of mixtures: which numbers of a layer's reports they show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT, TOKENS_BY_EXPERT
from pipeline.reporting import experts as maps
from pipeline.reporting.drawing import Plot
from tests import factories
from tests.families.geometries import llama

GEOMETRY = geometry_of(standard_config(factories.make_config("mixtral", num_hidden_layers=2).to_dict()))
WIDTH = GEOMETRY.layers[0].mlps[0].width
COUNT = GEOMETRY.layers[0].num_experts


def run_of(layers: dict[int, dict[str, dict[str, Any]]], geometry: Any = GEOMETRY) -> Any:
    def entry(groups: dict[str, dict[str, Any]]) -> Any:
        return SimpleNamespace(
            groups={name: SimpleNamespace(as_json=lambda report=report: report) for name, report in groups.items()}
        )

    return SimpleNamespace(geometry=geometry, layers={layer: entry(groups) for layer, groups in layers.items()})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[tuple[int, int], float]]:
    """The values of each map that was drawn."""
    seen: dict[str, dict[tuple[int, int], float]] = {}

    def note(name: str, values: Any, logarithmic: bool, label: str, caption: str) -> Plot:
        seen[name] = dict(values)
        return Plot("", caption)

    monkeypatch.setattr(maps, "_heat_map", note)
    return seen


def test_experts_by_themselves(drawn: dict[str, dict[tuple[int, int], float]]) -> None:
    groups = {f"experts.{number}": {"tokens": 10 * number, "ranks": {"width": WIDTH // 2}} for number in (0, 1)}
    plots = maps.expert_plots(run_of({1: groups}), {"1/0/experts.1": 0.25, "1/0/experts.0": 0.0})
    assert len(plots) == 3
    assert drawn == {
        "tokens": {(1, 0): 0.0, (1, 1): 10.0},
        "widths": {(1, 0): 0.5, (1, 1): 0.5},
        "losses": {(1, 0): maps.LEAST, (1, 1): 0.25},
    }


def test_experts_that_are_chosen_together(drawn: dict[str, dict[tuple[int, int], float]]) -> None:
    kept = [*range(1, COUNT)]
    scores = {TOKENS_BY_EXPERT: [*range(COUNT)], REMOVAL_LOSS_BY_EXPERT: [0.5] * COUNT}
    maps.expert_plots(run_of({0: {"experts": {"experts": kept, "width": WIDTH // 4, "ranks": {}, **scores}}}), {})
    assert drawn["widths"] == {(0, 0): 0.0, **{(0, number): (WIDTH // 4) / WIDTH for number in kept}}
    assert drawn["tokens"] == {(0, number): number for number in range(COUNT)}
    assert set(drawn["removals"].values()) == {0.5}
    assert "saliencies" not in drawn


def test_a_model_without_experts_has_no_map(drawn: dict[str, dict[tuple[int, int], float]]) -> None:
    run = run_of({0: {"mlp": {"tokens": 5, "ranks": {"width": 3}}}}, llama())
    assert maps.expert_plots(run, {"0/0/mlp": 0.1}) == []
    assert drawn == {}
