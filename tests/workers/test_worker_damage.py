"""A worker's units on damaged weights, activations and files: the error names the damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import CorruptError, LostInputError, NumericsError
from pipeline.methods.method import Moment
from pipeline.units.sums import ChooseGrids
from pipeline.units.units import Forward, Solve, Write
from tests.failing_disk import flip
from tests.workers.bench import (
    LOW,
    Reference,
    close,
    held,
    make_setup,
    make_worker,
    rewrite,
    solve_layer,
    tasks_of,
)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_bad_weights_name_layer_and_tensor(llama: Path, tmp_path: Path, value: float) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    model = rewrite(llama, tmp_path / "model", name, lambda weight: weight[0].fill_(value))
    setup = make_setup(model, tmp_path / "run", {"mlp": False, "basis": "value", "weighting": "none"})
    worker = make_worker(setup)
    worker.execute(Forward("dense", 0, 0))
    with pytest.raises(NumericsError, match=rf"tensor {name} holds NaN or infinity; the checkpoint is damaged"):
        worker.execute(Forward("dense", 1, 0, replay=(None,)))
    (task,) = tasks_of(setup, 1)
    record = worker.statistics.write(1, "dense-v.out", torch.eye(12).expand(3, 12, 12).double())
    with pytest.raises(NumericsError, match=rf"layer 1: tensor {name}"):
        worker.execute(Solve(task, LOW, {task.moments[0]: record}))


def test_bad_weights_that_are_only_copied_are_found_too(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    model = rewrite(llama, tmp_path / "model", name, lambda weight: weight[0].fill_(float("nan")))
    with pytest.raises(NumericsError, match=name):
        make_worker(make_setup(model, tmp_path / "run", {})).execute(Write(1, (), (), {}))


def test_bad_embeddings_are_named(llama: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    model = rewrite(llama, tmp_path / "model", name, lambda weight: weight[90].fill_(float("nan")))
    with pytest.raises(NumericsError, match=name):
        make_worker(make_setup(model, tmp_path / "run")).execute(Forward("dense", 0, 0))


def test_activations_that_overflow_name_layer_and_module(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = rewrite(llama, tmp_path / "model", name, lambda weight: weight.fill_(3e38))
    worker = make_worker(make_setup(model, tmp_path / "run"))
    with pytest.raises(NumericsError, match=r"layer 1: NaN or infinity first appears in the output of mlp\.up_proj"):
        worker.execute(Forward("dense", 1, 0, replay=(None,)))
    unit = ChooseGrids(Forward("dense", 1, 0, replay=(None,), emit=False, moments=(Moment("down.in"),)))
    with pytest.raises(NumericsError, match=r"layer 1: activations at down\.in: "):
        worker.execute(unit)


def damage_arrays(run_dir: Path, store: str, record: dict[str, Any]) -> None:
    chunks = list((run_dir / store / record.path).glob("c.*"))
    assert chunks
    for chunk in chunks:
        flip(chunk)


def test_corrupt_statistics_name_their_record(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run", {"attention": False})
    worker, moment = make_worker(setup), Moment("down.in")
    record = worker.statistics.write(0, "dense-down.in", torch.eye(80).double()[None])
    damage_arrays(setup.run_dir, "statistics.zarr", record)
    (task,) = tasks_of(setup, 0)
    with pytest.raises(CorruptError) as raised:
        worker.execute(Solve(task, LOW, {moment: record}))
    assert raised.value.path == record.path


@pytest.mark.parametrize("vanished", [False, True])
def test_corrupt_hidden_states_name_their_record_and_are_let_go(llama: Path, tmp_path: Path, vanished: bool) -> None:
    setup = make_setup(llama, tmp_path / "run")
    reference = Reference(llama, setup)
    record = make_worker(setup).execute(Forward("dense", 0, 0, store=True)).activation
    worker = make_worker(setup)
    unit = Forward("dense", 1, 0, base=1, base_record=record)
    if vanished:
        worker.activations.drop(record)
    else:
        damage_arrays(setup.run_dir, "activations.zarr", record)
    with pytest.raises(CorruptError) as raised:
        worker.execute(unit)
    assert raised.value.path == record.path
    # The driver takes the entry back and starts further down; the worker must not hold on to the bad ones.
    worker.execute(Forward("dense", 1, 0, base=0, replay=(None,)))
    close(held(worker, "dense", 2, 0), reference.shard(reference.hidden_LMSD[2], 0))


def test_corrupt_spilled_states_are_lost_with_the_worker_s_word(llama: Path, tmp_path: Path) -> None:
    """No entry names them, so that there is none to take back."""
    setup = make_setup(llama, tmp_path / "run", hidden_bytes=0)
    worker, reference = make_worker(setup), Reference(llama, setup)
    worker.execute(Forward("dense", 0, 0))
    for chunk in (setup.run_dir / "activations.zarr" / "dense").rglob("c.*"):
        flip(chunk)
    unit = Forward("dense", 1, 0, replay=(None,))
    with pytest.raises(LostInputError, match="forward/dense/1/0/dense: spilled hidden states are damaged"):
        worker.execute(unit)
    worker.execute(unit)
    close(held(worker, "dense", 2, 0), reference.shard(reference.hidden_LMSD[2], 0))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "header"])
def test_corrupt_staged_layers_name_their_record(llama: Path, tmp_path: Path, how: str) -> None:
    setup = make_setup(llama, tmp_path / "run", {})
    worker = make_worker(setup)
    staged, _ = solve_layer(worker, 0, LOW)
    path = setup.run_dir / staged.path
    if how == "flipped":
        flip(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b'"F32","shape":[15,48]', b'"I32","shape":[48,15]'))
    with pytest.raises(CorruptError) as raised:
        worker.execute(Forward("compressed", 0, 0, staged=staged))
    assert raised.value.path == staged.path
