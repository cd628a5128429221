"""Jobs on mixtures of experts that store codes of a few bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.jobs import Job, command, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_quantize import load_plain, rounding

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}  # groups of 32 divide them


@pytest.mark.parametrize(
    ("skip", "plain"),
    [
        (["down"], {"experts.down", "shared.down", "down"}),
        (["experts.down", "shared.gate"], {"experts.down", "shared.gate"}),
        (["experts.gate", "experts.up", "experts.down"], {"experts.gate", "experts.up", "experts.down"}),
    ],
)
def test_roles_of_experts_are_skipped(skip: list[str], plain: set[str], tmp_path: Path, job: MakeJob) -> None:
    """In glm4_moe the first layer has a dense MLP, the second experts and a shared one."""
    source = make_source(tmp_path / "source", "glm4_moe", 2, **SIZES)
    made = job(source, methods=[], budget=None, **rounding(8, skip=skip))
    assert made.run().code == 0
    unrounded = set()
    for name in read_tensors(made.output):
        path, _, kind = name.rpartition("_proj.")
        if kind == "weight" and ".mlp." in path:
            block = {"experts": "experts.", "shared_experts": "shared."}.get(path.split(".")[4], "")
            unrounded.add(block + path.rpartition(".")[2])
    assert unrounded == plain
    ids_BT = some_tokens(320)
    config = json.loads((made.output / "config.json").read_text())
    meant = logits_of(load_plain(made.output, config), ids_BT)
    assert relative_error(logits_of(load(made.output), ids_BT), meant) < 1e-5
    assert command("verify", str(made.output), "--source", str(source)).code == 0


def test_a_skipped_role_that_no_layer_has(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "mixtral", 1, hidden_size=64, intermediate_size=96)
    ended = job(source, methods=[], budget=None, **rounding(8, skip=["shared.down"])).run()
    assert ended.code == 2
    assert "has no matrix shared.down; it has q, k, v, o, experts.gate, experts.up, experts.down" in ended.err
