"""What `init` recommends can be planned, for every family and goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.calibration import Text
from manifests.errors import InputError
from pipeline.recommendation.recommending import Request, recommend
from pipeline.recommendation.settings import Goal
from tests import factories

SAMPLE = ("llama", "mixtral", "deepseek_v3", "nemotron_h", "llama4_text")
GOALS = (None, Goal("keep", 0.6), Goal("max_loss", 0.02))
FAMILIES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.nightly) for name in factories.ALL_FAMILIES]


def recommended(folder: Path, goal: Goal | None, family: str, **config: object) -> str:
    """Return the manifest for a random model."""
    model, text = factories.make_model(folder / "model", family, **config), factories.write_text(folder / "text.txt")
    return recommend(Request(str(model), Text(files=(str(text),)), goal, str(folder)), "init")[0]


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.label if goal else "usual")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_a_manifest_that_is_planned(family: str, goal: Goal | None, tmp_path: Path) -> None:
    text = recommended(tmp_path, goal, family)  # its plan is made on the way
    assert "method: loss_aware" in text


@pytest.mark.slow
@pytest.mark.parametrize("experts", [8, 10])
def test_corrections_are_left_out_where_a_worker_would_hold_too_many_experts(experts: int, tmp_path: Path) -> None:
    text = recommended(tmp_path, Goal("keep", 0.6), "mixtral", num_local_experts=experts)
    assert ("{method: loss_aware, correct: output}" in text) == (experts == 8)
    assert ("a worker would have to hold all 10 experts of a layer" in text) == (experts == 10)


@pytest.mark.slow
def test_bytes_are_no_goal_where_no_group_of_scales_fits_the_experts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--bytes: no group of scales fits the experts \(.* reads .* numbers\)"):
        recommended(tmp_path, Goal("bytes", 0.5), "mixtral")
    text = recommended(tmp_path, Goal("bytes", 0.5), "mixtral", hidden_size=32, intermediate_size=32, head_dim=16)
    assert "quantize: {bits: auto}" in text
