"""A worker's units in this process, with real stores: against transformers' model, hooked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manifests.errors import NumericsError
from manifests.quantize import Quantize
from manifests.records import FormSpec, StagedLayer
from pipeline.methods.method import Moment
from pipeline.units.sums import ChooseGrids, Summed, Sums, Total
from pipeline.units.units import Forward, Reduce, ShardDone, Solve, Unwritten
from stores.staging import read_staged
from tests.workers.bench import (
    EVERYTHING,
    LOW,
    SAMPLES,
    SEQUENCE,
    Reference,
    close,
    collect,
    held,
    layer_names,
    make_setup,
    make_worker,
    save_source,
    solve_layer,
    sum_layer,
    tasks_of,
    write_unit,
)
from workers.worker import Worker

pytestmark = pytest.mark.sample(3)


def moment_of(values: Tensor, moment: Moment) -> Tensor:
    """Σ y yᵀ in float64, head by head."""
    rows = values.reshape(-1, moment.heads, values.shape[-1] // moment.heads).double()
    total = torch.zeros(moment.groups, rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for part in range(moment.heads):
        total[part * moment.groups // moment.heads] += rows[:, part].T @ rows[:, part]
    return total


# Forward --------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_those_of_the_source(model: Path, tmp_path: Path) -> None:
    setup = make_setup(model, tmp_path / "run")
    worker, reference = make_worker(setup), Reference(model, setup)
    for layer in range(setup.geometry.num_layers):
        for shard in range(setup.shards):
            done = worker.execute(Forward("dense", layer, shard, replay=(None,) * layer, ahead=layer + 1))
            assert isinstance(done, ShardDone)
            assert done.tokens == len(reference.shard(reference.ids_MS, shard)) * SEQUENCE
            assert (done.partials, done.cosine, done.activation) == ({}, None, None)
            close(held(worker, "dense", layer + 1, shard), reference.shard(reference.hidden_LMSD[layer + 1], shard))
        if layer + 1 == setup.geometry.num_layers - 1:
            break  # there is nothing ahead of the last layer
    assert worker.compute_seconds > 0


def test_moments_and_cosines_are_those_of_hooks_on_the_source(model: Path, tmp_path: Path) -> None:
    setup = make_setup(model, tmp_path / "run")
    worker, reference = make_worker(setup), Reference(model, setup)
    heads, groups = setup.geometry.layers[1].attention.heads, setup.geometry.layers[1].attention.kv_heads
    moments = (
        Moment("attention.in"), Moment("o.in", heads, groups), Moment("v.out", groups, groups),
        Moment("q.out", heads, heads), Moment("k.out", groups, groups), Moment("mlp.in"), Moment("down.in"),
    )  # fmt: skip
    for moment, record in sum_layer(1, moments, [worker, worker]).items():
        point = {"attention.in": "q.in", "mlp.in": "up.in"}.get(moment.point, moment.point)
        expected = moment_of(reference.at(1, point), moment)
        found = worker.statistics.read(record)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    for shard in range(setup.shards):
        done = worker.execute(Forward("dense", 1, shard, cosine=True, emit=False, replay=(None,)))
        before, after = (reference.shard(reference.hidden_LMSD[layer], shard).double() for layer in (1, 2))
        cosines = functional.cosine_similarity(before, after, dim=-1)
        assert done.cosine == (pytest.approx(cosines.sum().item(), rel=1e-5), cosines.numel())
        assert worker.hidden.get(("dense", 2, shard)) is None


def test_micro_batches_change_nothing_but_rounding(llama: Path, tmp_path: Path) -> None:
    found = []
    for batch in (1, 2, 5):
        setup = make_setup(llama, tmp_path / f"run-{batch}", micro_batch=batch, shards=1)
        worker = make_worker(setup)
        moment = Moment("down.in")
        done = worker.execute(Forward("dense", 0, 0, cosine=True))
        hidden = held_all(worker).clone()
        found.append((hidden, worker.statistics.read(sum_all(worker, moment)), done.cosine))
    for hidden, moment_1NN, cosine in found[1:]:
        close(hidden, found[0][0])
        torch.testing.assert_close(moment_1NN, found[0][1], rtol=1e-5, atol=1e-5)
        assert cosine == (pytest.approx(found[0][2][0]), found[0][2][1])


def sum_all(worker: Worker, moment: Moment) -> Any:
    """Sum a moment of layer 0 over its first shard alone."""
    unit = Forward("dense", 0, 0, moments=(moment,), emit=False)
    grids = worker.execute(ChooseGrids(unit)).grids
    unit = replace(unit, sums=Sums("pass-0", grids))
    worker.execute(unit)
    part = collect(worker, unit, (moment,))
    summed = Summed(grids[moment], part.partials[moment], part.tokens[moment])
    return worker.execute(Total("dense", 0, moment, summed))


def held_all(worker: Worker) -> Tensor:
    slices = worker.hidden.get(("dense", 1, 0))
    assert slices is not None
    return slices.read(0, SAMPLES)


def test_a_worker_that_holds_nothing_starts_at_the_base(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run")
    first, reference = make_worker(setup), Reference(llama, setup)
    records = [first.execute(Forward("dense", 0, shard, store=True)).activation for shard in range(2)]
    assert all(record.shape[1:] == (SEQUENCE, 48) for record in records)
    for base, base_record in ((0, None), (1, records[1])):
        newcomer = make_worker(setup)
        replay = (None,) * (2 - base)
        newcomer.execute(Forward("dense", 2, 1, base=base, base_record=base_record, replay=replay))
        close(held(newcomer, "dense", 3, 1), reference.shard(reference.hidden_LMSD[3], 1))
    assert torch.equal(held(first, "dense", 1, 1), first.activations.open(records[1]).read(0, 3))


def test_what_is_held_is_used_and_needs_no_replay(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker = make_worker(setup)
    worker.execute(Forward("dense", 0, 0))
    worker.execute(Forward("dense", 1, 0, replay=(None,)))
    built: list[int] = []
    real = worker.layers.block
    monkeypatch.setattr(worker.layers, "block", lambda layer, *others: built.append(layer) or real(layer, *others))
    worker.execute(Forward("dense", 2, 0, replay=(None, None), emit=False, cosine=True))
    assert built == [2]


def test_committed_inputs_that_were_never_entered_are_a_fault_of_the_driver(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no committed hidden states for layer 1"):
        make_worker(make_setup(llama, tmp_path / "run")).execute(Forward("dense", 1, 0, base=1))


@pytest.mark.parametrize("limit", [0, 3 * SEQUENCE * 48 * 4])
def test_spilled_hidden_states_change_nothing(llama: Path, tmp_path: Path, limit: int) -> None:
    setup = make_setup(llama, tmp_path / "run", hidden_bytes=limit)
    worker, reference = make_worker(setup), Reference(llama, setup)
    for layer in range(2):
        for shard in range(2):
            done = worker.execute(Forward("dense", layer, shard, replay=(None,) * layer))
            assert done.activation is None  # nobody asked for it
            close(held(worker, "dense", layer + 1, shard), reference.shard(reference.hidden_LMSD[layer + 1], shard))
    stored = list((tmp_path / "run" / "activations.zarr" / "dense").glob("layer-*/shard-*/*/zarr.json"))
    assert len(stored) == (2 if limit == 0 else 1)


def test_the_next_layer_is_read_ahead(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker = make_worker(setup)
    worker.execute(Forward("dense", 0, 0, ahead=1))
    assert worker.layers.ahead is not None
    name, future = worker.layers.ahead
    assert name == ((1, "dense"), 0, True)
    weight = future.result(timeout=30)["model.layers.1.self_attn.q_proj.weight"]
    worker.execute(Forward("dense", 1, 0, replay=(None,), ahead=None))
    assert worker.layers.ahead is None
    assert worker.layers.current is not None
    assert worker.layers.current[1].module.role("q").weight.data_ptr() == weight.data_ptr()


def test_a_read_ahead_that_failed_is_tried_again(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(llama, tmp_path / "run")
    worker = make_worker(setup)
    real = worker.layers._read_layer
    failing = [True]

    def read(*asked: Any) -> dict[str, Tensor]:
        if failing.pop() if failing else False:
            raise NumericsError("a passing fault")
        return real(*asked)

    monkeypatch.setattr(worker.layers, "_read_layer", read)
    worker.layers.read_ahead(1)
    with pytest.raises(NumericsError):
        worker.layers.block(1, None)
    assert worker.layers.block(1, None).index == 1


def test_bfloat16_forward(tmp_path: Path) -> None:
    model = save_source(tmp_path / "model", "llama-gqa", torch.bfloat16)
    setup = make_setup(model, tmp_path / "run", dtype=torch.bfloat16)
    worker, reference = make_worker(setup), Reference(model, setup)
    done = worker.execute(Forward("dense", 0, 0, store=True))
    found = held(worker, "dense", 1, 0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, reference.shard(reference.hidden_LMSD[1], 0), rtol=2e-2, atol=2e-2)
    assert torch.equal(worker.activations.open(done.activation).read(0, len(found)), found)


# Reduce, Solve, Write -------------------------------------------------------------------------------------------------


def test_samples_are_put_together_in_the_order_given(llama: Path, tmp_path: Path) -> None:
    worker, sample = make_worker(make_setup(llama, tmp_path / "run")), Moment("down.in", kind="sample", tokens=6)
    handles = [worker.transfer.put({"moment": torch.full((1, 2, 3), float(value))}) for value in range(3)]
    record = worker.execute(Reduce("dense", 0, sample, (handles[2], handles[0])))
    assert record.path.startswith("layer-00000/dense-sample-down.in-6/")
    assert worker.statistics.read(record)[0, :, 0].tolist() == [2.0, 2.0, 0.0, 0.0]


def test_full_rank_is_the_dense_layer(model: Path, tmp_path: Path) -> None:
    setup = make_setup(model, tmp_path / "run", EVERYTHING)
    worker, reference = make_worker(setup), Reference(model, setup)
    geometry = setup.geometry.layers[0]
    full = {
        "value": geometry.attention.head_dim,
        "mlp": geometry.mlps[0].width,
        "query_key": geometry.attention.head_dim,
    }
    staged, reports = solve_layer(worker, 0, full)
    worker.execute(Forward("compressed", 0, 0, staged=staged))
    found, expected = held(worker, "compressed", 1, 0), reference.shard(reference.hidden_LMSD[1], 0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert all(report.get("error", 0.0) < 1e-9 for report in reports.values())


def test_compressed_layer_is_the_source_s_with_padded_factors(model: Path, tmp_path: Path) -> None:
    """Fewer value dimensions and channels are the dense layer with zeros in their place."""
    setup = make_setup(model, tmp_path / "run", {"basis": "value", "weighting": "none"})
    worker, reference = make_worker(setup), Reference(model, setup)
    geometry = setup.geometry.layers[0]
    rank, width = 5, 33
    staged, _ = solve_layer(worker, 0, {"value": rank, "mlp": width})
    worker.execute(Forward("compressed", 0, 0, staged=staged))
    factors = read_staged(setup.run_dir, staged)
    with torch.no_grad():
        for role in (role for role in geometry.roles if role in ("v", "o", "gate", "up", "down")):
            module = reference.module(0, role)
            for part in ("weight", "bias"):
                name = f"{geometry.path(role)}.{part}"
                if name in factors:
                    heads = {"v": geometry.attention.kv_heads, "o": geometry.attention.heads}.get(role)
                    getattr(module, part).copy_(padded(factors[name], getattr(module, part), heads))
    seen: list[Tensor] = []
    reference.layers[0].register_forward_hook(
        lambda *call: seen.append(call[2][0] if isinstance(call[2], tuple) else call[2])
    )
    with torch.no_grad():
        reference.model(reference.ids_MS, use_cache=False)
    close(held(worker, "compressed", 1, 0), reference.shard(seen[0], 0))


def padded(factor: Tensor, dense: Tensor, heads: int | None) -> Tensor:
    """Zeros for what was dropped: at the end of every head, or at the end."""
    result = torch.zeros_like(dense)
    for axis in range(dense.ndim):
        if factor.shape[axis] != dense.shape[axis]:
            parts = heads or 1
            kept, whole = factor.shape[axis] // parts, dense.shape[axis] // parts
            index = torch.cat([torch.arange(kept) + part * whole for part in range(parts)])
            return result.index_copy_(axis, index, factor)
    return result.copy_(factor)


def test_what_nobody_claims_is_copied_bit_for_bit(model: Path, tmp_path: Path) -> None:
    setup = make_setup(model, tmp_path / "run", {"mlp": False})
    worker = make_worker(setup)
    staged, _ = solve_layer(worker, 1, LOW)
    written = read_staged(setup.run_dir, staged)
    source = setup.source.read(layer_names(setup, 1))
    assert set(written) == set(source)
    for name, tensor in source.items():
        claimed = any(name.startswith(f"{setup.geometry.layers[1].path(role)}.") for role in ("v", "o"))
        if not claimed:
            assert torch.equal(written[name], tensor), name
        assert written[name].dtype == tensor.dtype
    assert staged.forms == dict.fromkeys(("v", "o"), FormSpec(form="head_pca", rank=5))
    assert staged.path.startswith("staged/layer-00001.")


def test_units_done_twice_give_the_same(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    worker = make_worker(setup)
    first, reports = solve_layer(worker, 0, LOW)
    again, reports_again = solve_layer(worker, 0, LOW)
    assert first.sha256 == again.sha256
    assert first.path != again.path, "what an entry names is never overwritten"
    assert reports == reports_again
    unit = Forward("compressed", 0, 1, staged=first, store=True, cosine=True)
    one = worker.execute(unit)
    states = held(worker, "compressed", 1, 1).clone()
    two = worker.execute(unit)
    assert torch.equal(held(worker, "compressed", 1, 1), states)
    assert one.cosine == two.cosine
    assert one.activation.checksums == two.activation.checksums
    assert one.activation.path != two.activation.path


def test_two_workers_give_what_one_gives(llama: Path, tmp_path: Path) -> None:
    """Bit for bit, whoever has which shard, and whoever solves."""
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    alone, _ = solve_layer(make_worker(setup), 1, LOW)
    workers = [make_worker(setup) for _ in range(2)]
    solved = []
    for task in tasks_of(setup, 1):
        records = sum_layer(1, task.moments, workers)
        solved.append(workers[0].execute(Solve(task, LOW, records)))
    staged = workers[1].execute(write_unit(setup, 1, solved))
    assert staged.sha256 == alone.sha256


def test_replay_through_staged_layers(llama: Path, tmp_path: Path) -> None:
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    worker = make_worker(setup)
    staged = [solve_layer(worker, layer, LOW)[0] for layer in (0, 1)]
    worker.execute(Forward("compressed", 0, 0, staged=staged[0]))
    worker.execute(Forward("compressed", 1, 0, staged=staged[1], replay=(staged[0],)))
    newcomer = make_worker(setup)
    newcomer.execute(Forward("compressed", 2, 0, emit=False, cosine=True, replay=tuple(staged)))
    assert torch.equal(held(newcomer, "compressed", 2, 0), held(worker, "compressed", 2, 0))


@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group": None}])
def test_a_layer_from_its_factors_is_what_is_written_of_it(
    llama: Path, tmp_path: Path, quantize: dict[str, Any] | None
) -> None:
    setup = make_setup(llama, tmp_path / "run", EVERYTHING)
    if quantize:
        assert setup.manifest is not None
        setup = replace(setup, manifest=setup.manifest.model_copy(update={"quantize": Quantize(**quantize)}))
    worker, newcomer = make_worker(setup), make_worker(setup)
    solved = [
        worker.execute(Solve(task, LOW, sum_layer(0, task.moments, [worker, worker]))) for task in tasks_of(setup, 0)
    ]
    write = write_unit(setup, 0, solved)
    rounded = {path: scheme for found in solved for path, scheme in found.rounded.items()}
    assert bool(rounded) == bool(quantize)
    newcomer.execute(Forward("compressed", 0, 0, staged=Unwritten("one", write, rounded)))
    staged = StagedLayer(**dict(worker.execute(write)), forms=write.forms, rounded=rounded)
    worker.execute(Forward("compressed", 0, 0, staged=staged))
    assert torch.equal(held(newcomer, "compressed", 1, 0), held(worker, "compressed", 1, 0))
    built = newcomer.layers.current
    newcomer.execute(Forward("compressed", 0, 1, staged=Unwritten("one", write, rounded)))
    assert newcomer.layers.current is built
    newcomer.execute(Forward("compressed", 0, 1, staged=Unwritten("other", write, rounded)))
    assert newcomer.layers.current is not built
