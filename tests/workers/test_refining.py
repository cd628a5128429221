"""A worker trains solved layers: its figures, what it stores, and that every form has its tensors back.

M samples, S sequence, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.errors import CorruptError
from manifests.quantize import Quantize
from manifests.records import StagedLayer
from pipeline.units.units import Pair, Refine, RefineDone, Solve, SolvedGroup
from tests.failing_disk import flip
from tests.families.geometries import manifest
from tests.workers.bench import (
    SAMPLES,
    SEQUENCE,
    make_setup,
    make_worker,
    save_source,
    sum_layer,
    tasks_of,
    write_unit,
)
from workers.refining import RefinementData, group_tensors, training_of

TRAINED = {"refine": {"steps": 12, "learning_rate": 0.003}}
FLAT = {"method": "flat_llm", "allocation": "uniform", **TRAINED}
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "flat_llm": ("llama-gqa", FLAT, {"value": 5, "mlp": 33}),
    "magnitude-opt": ("opt-tied", {"method": "magnitude", **TRAINED}, {"mlp": 33}),
    "lorc": ("llama-gqa", {"method": "lorc", **TRAINED}, {"key": 9, "value": 9}),
    "joint": ("llama-gqa", {"method": "joint_rank_k", **TRAINED}, {"query_key": 9, "mlp": 12}),
    "joint-heads": ("gptj", {"method": "joint_rank_k", "query_key": "joint_per_head", "mlp": False, **TRAINED},
                    {"query_key": 3, "mlp": 12}),
    "magnitude": ("qwen2-tied", {"method": "magnitude", **TRAINED}, {"mlp": 33}),
    "svd": ("qwen3", {"method": "svd", **TRAINED},
            dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 7)),
}  # fmt: skip


class Bench:
    """A worker with a layer that is solved, and targets of both models' shards."""

    def __init__(self, model: Path, run_dir: Path, entry: dict[str, Any], ranks: dict[str, int]):
        text = {"text": {"files": ["text.txt"]}, "samples": SAMPLES, "sequence_length": SEQUENCE, "shards": 2}
        self.worker = make_worker(make_setup(model, run_dir, manifest=manifest(entry, calibration=text)))
        solved, self.groups = [], []
        for task in tasks_of(self.worker.setup, 1):
            own = {name: ranks[name] for name in ranks} if len(ranks) == 1 else dict(ranks)
            done = self.worker.execute(Solve(task, own, sum_layer(1, task.moments, [self.worker] * 2)))
            solved.append(done)
            self.groups.append(SolvedGroup(task, own, done.forms, done.report))
        unit = write_unit(self.worker.setup, 1, solved)
        self.staged = StagedLayer(**dict(self.worker.execute(unit)), forms=unit.forms)
        units = [Pair(1, shard, 0, store=True, targets=True, replay=(None,)) for shard in range(2)]
        self.targets = tuple(self.worker.execute(unit).activation for unit in units)
        self.unit = Refine(1, self.staged, self.targets, tuple(self.groups))

    def read(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets (M, S, D) of all samples."""
        return RefinementData(self.worker.activations, self.targets, self.worker.setup).read(range(SAMPLES))

    def factors(self, done: RefineDone) -> dict[str, Tensor]:
        return {n: t for group in done.groups for n, t in self.worker.transfer.get(group.factors).items()}

    def difference(self, factors: dict[str, Tensor], samples: list[int]) -> Tensor:
        """The difference (M, S, D) of the layer with these factors to the dense one."""
        write = write_unit(self.worker.setup, 1, [])
        staged = self.worker.execute(
            replace(write, factors=(self.worker.transfer.put(factors),), forms=self.staged.forms)
        )
        block = self.worker.layers.block(1, StagedLayer(**dict(staged), forms=self.staged.forms))
        inputs_MSD, outputs_MSD = self.read()
        result_MSD = block.run(inputs_MSD[samples])
        assert result_MSD is not None
        return result_MSD - outputs_MSD[samples]

    def error(self, factors: dict[str, Tensor], samples: list[int]) -> float:
        """The relative square error of the layer with these factors."""
        outputs_MSD = self.read()[1][samples]
        return float(self.difference(factors, samples).square().mean() / outputs_MSD.square().mean())


@pytest.fixture(params=list(METHODS))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    family, entry, ranks = METHODS[request.param]
    return Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)


@pytest.mark.slow
def test_every_tensor_of_a_group_comes_back_by_its_name(bench: Bench) -> None:
    geometry = bench.worker.setup.geometry.layers[1]
    for group in bench.groups:
        keys = group_tensors(bench.staged, group, geometry)
        assert {geometry.tensor_name(key, group.task.roles): key for key in keys} == {
            name: key for key, name in keys.items()
        }
    claimed = [name for group in bench.groups for name in group_tensors(bench.staged, group, geometry).values()]
    copied = {name for role in ("input_norm", "mlp_norm", "q_norm", "k_norm") if role in geometry.roles
              for name in bench.staged.tensors if name.startswith(f"{geometry.path(role)}.")}  # fmt: skip
    assert len({*claimed}) == len(claimed)
    assert copied.isdisjoint(claimed)


@pytest.mark.slow
def test_the_error_falls_as_the_figures_say(bench: Bench) -> None:
    done = bench.worker.execute(bench.unit)
    figures, factors = done.refined, bench.factors(done)
    held_out = [2]
    assert (figures.held_out, figures.samples) == (len(held_out), SAMPLES - 1)
    methods = bench.worker.setup.manifest.methods
    assert figures.kept == (methods[0].method != "flat_llm"), "36 tokens lower the held-out error, but for flat_llm"
    assert (figures.after < figures.before) == figures.kept
    assert bench.error(factors, held_out) == pytest.approx(figures.after, rel=1e-3)
    assert [group.forms for group in done.groups] == [group.forms for group in bench.groups]
    again = make_worker(bench.worker.setup).execute(bench.unit)
    assert again.refined == figures


def test_nothing_changes_where_training_does_not_help(tmp_path: Path) -> None:
    family, entry, ranks = METHODS["flat_llm"]
    ruinous = {**entry, "refine": {"steps": 12, "learning_rate": 0.9}}
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", ruinous, ranks)
    done = bench.worker.execute(bench.unit)
    assert (done.refined.kept, done.refined.steps) == (False, 0)
    assert done.refined.after == done.refined.before
    before = {name: record.sha256 for name, record in bench.staged.tensors.items()}
    write = write_unit(bench.worker.setup, 1, list(done.groups))
    assert {name: record.sha256 for name, record in bench.worker.execute(write).tensors.items()} == before


@pytest.mark.slow
def test_the_gradient_weighs_the_errors(tmp_path: Path) -> None:
    family, entry, ranks = METHODS["svd"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    hidden = bench.worker.setup.geometry.hidden
    weights_D, half = torch.ones(hidden, dtype=torch.float64), hidden // 2
    plain = bench.worker.execute(bench.unit)
    even, first = (
        bench.worker.execute(
            replace(bench.unit, gradient=bench.worker.statistics.write(1, name, torch.diag(7.0 * weights_D)[None]))
        )
        for name, weights_D in (("even", weights_D), ("first", weights_D.where(torch.arange(hidden) < half, 1e-6)))
    )
    assert even.refined.before == pytest.approx(plain.refined.before, rel=1e-5)
    assert even.refined.after == pytest.approx(plain.refined.after, rel=1e-3)
    assert first.refined.kept
    unweighted, weighted = (
        float(bench.difference(bench.factors(done), [0, 1, 3, 4])[..., :half].square().mean())
        for done in (plain, first)
    )
    assert weighted < unweighted


def test_matrices_are_rounded_behind_the_training(tmp_path: Path) -> None:
    family, entry, ranks = METHODS["flat_llm"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    plain = bench.worker.execute(bench.unit)
    errors = {}
    for feedback in (None, False):
        quantize = Quantize(bits=4, group=None, feedback=feedback)
        bench.worker.methods = [(method, quantize) for method, _ in bench.worker.methods]
        done = bench.worker.execute(bench.unit)
        assert done.refined == plain.refined
        assert all(group.rounded for group in done.groups)
        assert not any("nearest" in group.report for group in done.groups)
        errors[feedback] = max(group.report["rounding_error"] for group in done.groups)
    assert errors[None] < errors[False]


def test_the_pass_behind_a_training_reads_the_dense_outputs(tmp_path: Path) -> None:
    """The stored outputs give the same bits as computed ones."""
    family, entry, ranks = METHODS["magnitude"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    onward = Pair(1, 0, 0, bench.staged, emit=True, store=True, replay=(None,))
    known = replace(onward, known=bench.targets[0])
    records = [make_worker(bench.worker.setup).execute(unit).activation for unit in (onward, known)]
    computed, stored = (bench.worker.activations.open(record).read(0, 2) for record in records)
    assert torch.equal(computed, stored)


def test_dense_targets_leave_the_outputs_held(tmp_path: Path) -> None:
    family, entry, ranks = METHODS["magnitude"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    units = [Pair(layer, 0, 0, emit=True, store=True, targets=True, replay=(None,) * layer) for layer in range(2)]
    first, second = (bench.worker.activations.open(bench.worker.execute(unit).activation).read(0, 2) for unit in units)
    assert torch.equal(first.chunk(2, dim=-1)[0], second.chunk(2, dim=-1)[1])
    assert torch.equal(second, bench.worker.activations.open(bench.targets[0]).read(0, 2))


def test_mixed_targets_are_dense_inputs_with_a_share_of_the_error(tmp_path: Path) -> None:
    """Both models go on: layer 2 reads the dense layer 1, and the solved one."""
    family, entry, ranks = METHODS["joint"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    worker, share = bench.worker, 0.25
    through = Pair(1, 0, 0, bench.staged, emit=True, store=True, targets=True, share=share, replay=(None,))
    target_MSD, input_MSD = worker.activations.open(worker.execute(through).activation).read(0, 2).chunk(2, dim=-1)
    plain = worker.activations.open(bench.targets[0]).read(0, 2)
    assert torch.equal(torch.cat((target_MSD, input_MSD), dim=-1), plain), "nothing is compressed in front of layer 1"
    after = replace(through, layer=2, staged=None, emit=False, replay=(None, bench.staged))
    _, mixed_MSD = worker.activations.open(worker.execute(after).activation).read(0, 2).chunk(2, dim=-1)
    fresh = make_worker(worker.setup)
    replayed = fresh.activations.open(fresh.execute(after).activation).read(0, 2).chunk(2, dim=-1)[1]
    assert torch.equal(replayed, mixed_MSD)
    packed_MSD = worker.layers.block(1, bench.staged).run(input_MSD)
    assert packed_MSD is not None
    error = (packed_MSD - target_MSD).norm()
    assert error > 1e-3 * target_MSD.norm()
    assert (mixed_MSD - target_MSD - share * (packed_MSD - target_MSD)).norm() < 1e-5 * error


@pytest.mark.parametrize("what", ["staged", "targets"])
def test_damage_is_told_by_its_path(what: str, tmp_path: Path) -> None:
    family, entry, ranks = METHODS["flat_llm"]
    bench = Bench(save_source(tmp_path / "model", family), tmp_path / "run", entry, ranks)
    run_dir = bench.worker.setup.run_dir
    path = bench.staged.path if what == "staged" else bench.targets[1].path
    file = run_dir / path
    if what == "targets":
        file = next(
            part
            for part in (run_dir / "activations.zarr" / path).rglob("*")
            if part.is_file() and part.name != "zarr.json"
        )
    flip(file)
    with pytest.raises(CorruptError) as raised:
        bench.worker.execute(bench.unit)
    assert raised.value.path == path


@pytest.mark.parametrize(("samples", "tokens", "held_out", "train"), [
    (2, "all", [1], [0]), (64, "all", [5, 16, 26, 37, 48, 58], 58), (64, 256 * 10, [5, 16, 26, 37, 48, 58], 10),
    (64, 1, [5, 16, 26, 37, 48, 58], 1),
])  # fmt: skip
def test_samples_are_held_out_evenly(samples: int, tokens: Any, held_out: list[int], train: Any) -> None:
    from manifests.methods import Refine as Settings

    training = training_of(Settings(tokens=tokens), samples, 256, 0)
    assert training.held_out == held_out
    assert set(training.train).isdisjoint(held_out)
    assert (training.train if isinstance(train, list) else len(training.train)) == train
    assert (training.batch, training.rates[0]) == (4, 3e-3)
