"""Mixtures of experts that do not fit together, and budgets below what their routers need: refused by name, by `plan`
and by `run`, before work begins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.end_to_end.jobs import Job, MakeJob, command, read_tensors
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_wrong_input import edit_config, edit_index

Tensors = dict[str, torch.Tensor]
UP = "model.layers.3.mlp.experts.17.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 18 experts, of which a token passes two."""
    return make_source(tmp_path_factory.mktemp("mixture") / "source", "qwen3_moe", layers=4, num_experts=18)


def refused(made: Job, *words: str) -> None:
    """Neither command begins to work, and both say these words."""
    for ended in (command("plan", str(made.write().manifest)), made.run()):
        assert ended.code == 2, ended.err
        assert not [word for word in words if word not in ended.err], ended.err
        assert not made.run_dir.exists()
        assert not made.output.exists()


def in_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda source: edit_index(source, change)


def in_tensors(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    """Changes tensors and writes them as one shard."""

    def change_(source: Path) -> None:
        tensors = read_tensors(source)
        change(tensors)
        for path in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
            path.unlink()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    return change_


def lose_expert(names: dict[str, Any]) -> None:
    for name in [name for name in names if ".3.mlp.experts.17." in name]:
        del names[name]


def shorten(name: str, by: int = 1) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-by].clone()

    return change


def lengthen(tensors: Tensors) -> None:
    tensors[ROUTER] = torch.cat((tensors[ROUTER], tensors[ROUTER][:1]))


WRONG: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "the index lacks an expert": (in_index(lose_expert), (f"{UP}: missing", "experts.17.gate_proj.weight: missing")),
    "an expert is missing": (in_tensors(lose_expert), (f"{UP}: missing",)),
    "an expert is narrower": (in_tensors(shorten(UP)), (f"{UP}: shape [23, 48], expected [24, 48]",)),
    "a router has too few rows": (in_tensors(shorten(ROUTER)), (f"{ROUTER}: shape [17, 48], expected [18, 48]",)),
    "a router has too many rows": (in_tensors(lengthen), (f"{ROUTER}: shape [19, 48], expected [18, 48]",)),
    "more are chosen than there are": (
        lambda source: edit_config(source, num_experts_per_tok=19),
        ("config.json", "layer 0 chooses 19 of 18 experts"),
    ),
    "none is chosen": (lambda source: edit_config(source, num_experts_per_tok=0), ("config.json", "0")),
    "another number of experts": (
        lambda source: edit_config(source, num_local_experts=20),
        ("experts.19.up_proj.weight: missing", f"{ROUTER}: shape [18, 48], expected [20, 48]"),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_mixture_is_refused(case: str, mixture: Path, tmp_path: Path, job: MakeJob) -> None:
    damage, words = WRONG[case]
    source = shutil.copytree(mixture, tmp_path / "source")
    damage(source)
    refused(job(source), *words)


LEAST = "a router that chooses 8 experts leaves 8 of 18 or more"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            (
                {"methods": [{"method": name}], "budget": {"keep": 0.43, "scope": "experts"}},
                ("budget.keep: 0.43", LEAST),
            )
            for name in ("reap", "frequency", "merge_experts")
        ),
        ({"methods": [{"method": "reap", "keep": 0.44}], "budget": None}, ("methods.0.keep: 0.44", LEAST)),
        (
            {
                "methods": [{"method": "loss_aware", "shapes": "layer"}],
                "budget": {"keep": 0.01, "scope": "experts", "multiple": 8},
            },
            ("budget.keep: 0.01", LEAST),
        ),
        (
            {"methods": [{"method": "loss_aware", "shapes": "stock"}], "budget": {"keep": 0.05, "scope": "experts"}},
            ("budget.keep: 0.05", LEAST),
        ),
    ],
    ids=lambda value: next(iter(value["methods"]))["method"] if isinstance(value, dict) else "",
)
def test_a_budget_of_fewer_experts_than_the_router_chooses_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], mixture: Path, tmp_path: Path, job: MakeJob
) -> None:
    source = shutil.copytree(mixture, tmp_path / "source")
    edit_config(source, num_experts_per_tok=8)
    refused(job(source, **{"calibration.propagate": "dense"}, **changes), *words)


@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
def test_the_least_budget_keeps_as_many_experts_as_the_router_chooses(
    mixture: Path, tmp_path: Path, job: MakeJob
) -> None:
    source = shutil.copytree(mixture, tmp_path / "source")
    edit_config(source, num_experts_per_tok=8)
    made = job(source, methods=[{"method": "reap"}], budget={"keep": 0.45, "scope": "experts"})
    assert command("plan", str(made.write().manifest)).code == 0
    assert made.run().code == 0
    forms = json.loads((made.output / "config.json").read_text())["forms"]
    assert [layer["router"]["rank"] for layer in forms] == [8, 8, 8, 8]
    assert {ranks["experts"] for ranks in made.ledger("ranks")["ranks"].values()} == {8}
