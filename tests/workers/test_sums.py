"""Sums that workers keep: their content, the data that leaves a worker, and independence of any order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.entries import StatisticsEntry
from manifests.errors import NumericsError
from manifests.records import ArrayRecord, CountedRecord
from pipeline.kernels import exact_sums
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, CheckGrids, ChooseGrids, Summed, Sums, Total
from pipeline.units.units import Forward
from stores.statistics import StatisticsStore
from tests.families.geometries import llama as llama_geometry
from tests.workers.bench import collect, make_setup, make_worker, rewrite
from workers import sums
from workers.config import WorkerConfig
from workers.worker import Worker

SHARDS = 5
POINTS = (Moment("attention.in"), Moment("o.in", 6, 3), Moment("mlp.in"), Moment("down.in"))


@pytest.fixture
def setup(llama: Path, tmp_path: Path) -> WorkerConfig:
    return make_setup(llama, tmp_path / "run", shards=SHARDS, micro_batch=1)


def units(worker: Worker, name: str = "pass-0", moments: tuple[Moment, ...] = POINTS) -> list[Forward]:
    made = [Forward("dense", 0, shard, moments=moments, emit=False) for shard in range(worker.setup.shards)]
    grids = worker.execute(ChooseGrids(made[0])).grids
    return [replace(unit, sums=Sums(name, grids)) for unit in made]


def totals(worker: Worker, parts: Sequence[Any], made: Sequence[Forward]) -> dict[Moment, Tensor]:
    assert made[0].sums is not None
    grids = made[0].sums.grids
    found = {}
    for moment in made[0].moments:
        partials = tuple(handle for part in parts if part.shards for handle in part.partials[moment])
        tokens = sum(part.tokens[moment] for part in parts if part.shards)
        summed = Summed(grids[moment], partials, tokens)
        found[moment] = worker.statistics.read(worker.execute(Total("dense", 0, moment, summed)))
    return found


def same(found: dict[Moment, Tensor], expected: dict[Moment, Tensor]) -> bool:
    return all(torch.equal(found[moment], expected[moment]) for moment in expected)


@pytest.mark.slow
def test_no_order_and_no_division_of_the_shards_shows(setup: WorkerConfig) -> None:
    """All ways of giving five shards to two workers, forth and back, and the totals added either way."""
    alone = make_worker(setup)
    made = units(alone)
    for unit in made:
        alone.execute(unit)
    expected = totals(alone, [collect(alone, made[0], POINTS)], made)
    workers = [make_worker(setup), make_worker(setup)]
    for way, holders in enumerate(itertools.product((0, 1), repeat=SHARDS)):
        passed = [replace(unit, sums=replace(unit.sums, name=f"way-{way}")) for unit in made if unit.sums]
        for unit, holder in list(zip(passed, holders, strict=True))[:: 1 if way % 2 else -1]:
            workers[holder].execute(unit)
        parts = [collect(worker, passed[0], POINTS) for worker in workers[:: 1 if way % 3 else -1]]
        assert sorted(shard for part in parts for shard in part.shards) == list(range(SHARDS))
        assert same(totals(workers[way % 2], parts, passed), expected), holders


def test_a_shard_is_added_once_however_often_it_is_done(setup: WorkerConfig) -> None:
    worker = make_worker(setup)
    made = units(worker)
    for unit in made:
        worker.execute(unit)
    once = collect(worker, made[0], POINTS)
    for unit in [*made, made[3], *made[::-1]]:
        worker.execute(replace(unit, sums=replace(unit.sums, name="again")) if unit.sums else unit)
    again = collect(worker, replace(made[0], sums=Sums("again", {})), POINTS)
    assert again.shards == once.shards == tuple(range(SHARDS))
    assert same(totals(worker, [again], made), totals(worker, [once], made))


def test_what_is_collected_is_given_away(setup: WorkerConfig) -> None:
    worker = make_worker(setup)
    made = units(worker)
    worker.execute(made[0])
    assert collect(worker, made[0], POINTS).shards == (0,)
    assert collect(worker, made[0], POINTS).shards == ()
    worker.execute(made[1])
    assert collect(worker, made[0], POINTS).shards == (1,)


def test_one_pass_is_given_away_while_the_next_is_made(setup: WorkerConfig) -> None:
    """The sums are the same as one after the other; a third pass discards the first."""
    worker = make_worker(setup)
    passes = [units(worker, f"pass-{number}") for number in range(3)]
    for made in passes[:2]:
        worker.execute(made[0])
    first = collect(worker, passes[0][0], POINTS)
    worker.execute(passes[1][2])
    second = collect(worker, passes[1][0], POINTS)
    assert (first.shards, second.shards) == ((0,), (0, 2))
    for unit in (passes[2][2], passes[2][0]):
        worker.execute(unit)
    assert same(totals(worker, [collect(worker, passes[2][0], POINTS)], passes[2]), totals(worker, [second], passes[1]))
    for made in passes:
        worker.execute(made[1])
    assert [collect(worker, made[0], POINTS).shards for made in passes] == [(), (1,), (1,)]


def test_a_pass_that_was_given_up_is_held_no_longer_than_to_the_next_but_one(setup: WorkerConfig) -> None:
    worker = make_worker(setup)
    given_up, *passes = (units(worker, f"pass-{number}") for number in range(3))
    worker.execute(given_up[0])
    for made in passes:
        worker.execute(made[0])
        assert collect(worker, made[0], POINTS).shards == (0,)
    assert not worker.sums.passes


def test_a_shard_that_fails_leaves_no_half_of_itself(setup: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(replace(setup, shards=2))
    made = units(worker)
    worker.execute(made[0])
    block, runs = worker.layers.block(0, None), []
    real = block.run

    def failing(*arguments: Any, **named: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            raise NumericsError("in the middle")
        return real(*arguments, **named)

    monkeypatch.setattr(block, "run", failing)
    with pytest.raises(NumericsError, match="in the middle"):
        worker.execute(made[1])
    assert collect(worker, made[0], POINTS).shards == (), "what was added of it is gone, and all with it"


def test_a_moment_beyond_its_grid_asks_for_a_wider_one(setup: WorkerConfig) -> None:
    """The first sample tells nothing of the others: raised until it holds, the sum is the one of a good grid."""
    worker, moment = make_worker(setup), (Moment("down.in"),)
    good = units(worker, moments=moment)
    assert good[0].sums is not None
    tensors = worker.transfer.get(good[0].sums.grids[moment[0]])
    handle = worker.transfer.put({**tensors, "exponents": tensors["exponents"] - 14})
    rounds = 0
    while True:
        made = [replace(unit, sums=Sums(f"narrow-{rounds}", {moment[0]: handle})) for unit in good]
        for unit in made:
            worker.execute(unit)
        part = collect(worker, made[0], moment)
        check = CheckGrids("dense", 0, {moment[0]: handle}, {moment[0]: (part.diagonals[moment[0]],)})
        wider = worker.execute(check).wider
        if not wider:
            break
        handle, rounds = wider[moment[0]], rounds + 1
    assert rounds == 1
    stored = worker.execute(
        Total("dense", 0, moment[0], Summed(handle, part.partials[moment[0]], part.tokens[moment[0]]))
    )
    for unit in good:
        worker.execute(unit)
    expected = totals(worker, [collect(worker, good[0], moment)], good)[moment[0]]
    found = worker.statistics.read(stored)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7 * float(expected.max()))


def test_micro_batches_wait_for_each_other_up_to_a_product(
    setup: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never beyond a shard; what is multiplied together is the same whatever a micro-batch holds."""
    _samples, sequence = setup.tokens_shape
    counts: list[int] = []
    real = sums.MomentSum.add_

    def counted(total: Any, *values: Tensor) -> None:
        counts.append(sum(map(len, values)))
        real(total, *values)

    monkeypatch.setattr(sums.MomentSum, "add_", counted)
    monkeypatch.setattr(sums, "product_tokens", lambda heads, groups: 3 * sequence)
    for micro_batch, whole in ((1, 3), (2, 4)):
        setup = replace(setup, shards=2, micro_batch=micro_batch)
        worker, moments = make_worker(setup), (Moment("down.in"),)
        for unit in units(worker, moments=moments):
            counts.clear()
            worker.execute(unit)
            first, end = setup.sample_range(unit.shard)
            full, rest = divmod(end - first, whole)
            assert counts == [whole * sequence] * full + [rest * sequence] * bool(rest)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_what_leaves_a_worker_does_not_grow_with_the_shards(
    llama: Path, tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per layer 4 ΣF² bytes and the lower halves of the diagonal blocks, over the moments' widths F; in bands that are
    narrow beside these widths, as 512 rows are beside a large model's."""
    band = 4
    monkeypatch.setattr(exact_sums, "BAND", band)
    worker = make_worker(make_setup(llama, tmp_path / "run", shards=shards))
    left: list[int] = []
    real = worker.transfer.put
    worker.transfer.put = lambda tensors: left.append(sum(t.nbytes for t in tensors.values())) or real(tensors)  # type: ignore[method-assign,func-returns-value]
    made = units(worker)
    grids = sum(left)
    left.clear()
    for unit in made:
        worker.execute(unit)
    assert not left
    collect(worker, made[0], POINTS)
    geometry = worker.setup.geometry.layers[0]
    widths = [geometry.hidden, *[geometry.attention.head_dim] * 3, geometry.hidden, geometry.mlps[0].width]
    assert grids <= sum(2 * width for width in widths) + 16 * len(POINTS)
    assert sum(left) <= sum(4 * width * (width + band) + 8 * width for width in widths)
    assert sum(left) < 0.7 * sum(8 * width * width for width in widths), "a single triangle"


def test_values_that_are_none_name_their_layer_and_point(llama: Path, tmp_path: Path) -> None:
    model = rewrite(llama, tmp_path / "model", "model.layers.0.mlp.up_proj.weight", lambda weight: weight.fill_(3e38))
    worker = make_worker(make_setup(model, tmp_path / "run"))
    unit = ChooseGrids(Forward("dense", 0, 0, moments=(Moment("down.in"),), emit=False))
    with pytest.raises(NumericsError, match=r"layer 0: activations at down\.in: "):
        worker.execute(unit)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_total_is_symmetric_to_the_bit_and_stored_by_its_upper_tiles(setup: WorkerConfig, threads: int) -> None:
    worker = make_worker(setup)
    store = StatisticsStore(setup.run_dir / "tiles.zarr", tile=16, threads=threads)
    worker.statistics = worker.totals.statistics = store
    made = units(worker)
    for unit in made:
        worker.execute(unit)
    part = collect(worker, made[0], POINTS)
    before = {moment: [band.clone() for band in part.partials[moment][0].values()] for moment in POINTS}
    for moment, total in totals(worker, [part], made).items():
        assert torch.equal(total, total.transpose(1, 2))
        again = worker.statistics.write(0, "again", total)
        assert again.symmetric == (total.shape[1] > 16)
        summed = Summed(made[0].sums.grids[moment], part.partials[moment], part.tokens[moment])  # type: ignore[union-attr]
        found = worker.execute(Total("dense", 0, moment, summed))
        assert (found.symmetric, found.checksums) == (again.symmetric, again.checksums)
        assert torch.equal(worker.totals.moment(moment, found), total)
        assert all(torch.equal(*pair) for pair in zip(part.partials[moment][0].values(), before[moment], strict=True))


def test_parts_are_added_one_by_one_and_solved_from_before_they_are_stored(
    setup: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of two workers dealt into three parts: the same bits as one worker's sum, and as what is stored of them."""
    for module in (sums, exact_sums):
        monkeypatch.setattr(module, "BAND", 16, raising=False)
    workers = [make_worker(setup), make_worker(setup)]
    made = units(workers[0])
    for unit in made:
        workers[unit.shard % 2].execute(unit)
    given = [collect(worker, made[0], POINTS, parts=3) for worker in workers]
    for moment in POINTS:
        assert len(given[0].partials[moment]) == len(given[1].partials[moment]) <= 3
        both = tuple(handle for found in given for handle in found.partials[moment])
        assert made[0].sums is not None
        grid = made[0].sums.grids[moment]
        adds = [
            workers[0].execute(Add("dense", 0, moment, part, same)).part
            for part, same in enumerate(zip(*(found.partials[moment] for found in given), strict=True))
        ]
        tokens = sum(found.tokens[moment] for found in given)
        added = Summed(grid, tuple(adds), tokens)
        expected = workers[1].totals.moment(moment, Summed(grid, both, tokens))
        assert torch.equal(workers[1].totals.moment(moment, added), expected)
        stored = workers[0].execute(Total("dense", 0, moment, added))
        assert torch.equal(workers[1].totals.moment(moment, stored), expected)
    assert len(given[0].partials[Moment("down.in")]) == 3


def test_a_point_that_no_token_passes_has_a_sum_of_zeros_and_a_count_of_none(setup: WorkerConfig) -> None:
    """A router may send no token of the calibration text to an expert, or none of a worker's shards."""
    worker, seen, rare = make_worker(setup), Moment("mlp.in"), Moment("down.in")
    layer = setup.geometry.layers[0]
    squares = sums.Squares(100, layer)
    unit = Forward("dense", 0, 0, moments=(seen, rare), emit=False)
    values_BSF = torch.randn(1, 5, layer.hidden, generator=torch.Generator().manual_seed(0))
    squares.see(seen, values_BSF)
    grids = {moment: worker.transfer.put(grid.packed()) for moment, grid in squares.grids(unit).items()}
    assert grids.keys() == {seen, rare}
    unit = replace(unit, sums=Sums("pass", grids))
    add = worker.sums.adder(unit)
    assert add is not None
    with worker.sums.adding(unit):
        add(seen, values_BSF)
    part = collect(worker, unit, (seen, rare))
    assert part.tokens == {seen: 5, rare: 0}
    assert not worker.execute(
        CheckGrids("dense", 0, grids, {moment: (part.diagonals[moment],) for moment in grids})
    ).wider
    summed = {moment: Summed(grids[moment], part.partials[moment], part.tokens[moment]) for moment in grids}
    records = {moment: worker.execute(Total("dense", 0, moment, each)) for moment, each in summed.items()}
    assert {moment: record.tokens for moment, record in records.items()} == {seen: 5, rare: 0}
    width = layer.mlps[0].width
    assert torch.equal(worker.statistics.read(records[rare]), torch.zeros(1, width, width, dtype=torch.float64))
    for source in (summed, records):
        statistics = worker._statistics(0, source)
        assert {moment: statistics.passed[moment] for moment in (seen, rare)} == {seen: 5, rare: 0}
        assert statistics.unseen == ("down.in",)


def test_records_count_tokens_only_where_some_did_not_pass(setup: WorkerConfig) -> None:
    """A moment that all tokens passed is stored, and read again, as it always was."""
    worker = make_worker(setup)
    made = units(worker)
    for unit in made:
        worker.execute(unit)
    part = collect(worker, made[0], POINTS)
    assert made[0].sums is not None
    assert set(part.tokens.values()) == {math.prod(setup.tokens_shape)}
    whole = Summed(made[0].sums.grids[POINTS[0]], part.partials[POINTS[0]], part.tokens[POINTS[0]])
    for tokens, kind in ((whole.tokens, ArrayRecord), (7, CountedRecord)):
        record = worker.execute(Total("dense", 0, POINTS[0], replace(whole, tokens=tokens)))
        assert type(record) is kind
        stored = StatisticsEntry(statistics={"m": record}).as_json()
        assert type(StatisticsEntry.model_validate(stored).statistics["m"]) is kind
        assert ("tokens" in stored["statistics"]["m"]) == (kind is CountedRecord)


def test_a_pair_has_the_features_of_the_compressed_layer() -> None:
    """These may be fewer than the dense layer's, as when heads are gone."""
    layer, pair, generator = llama_geometry().layers[0], Moment("o.in", kind="pair"), torch.Generator().manual_seed(0)
    values, errors = (torch.randn(8, width, generator=generator) for width in (12, layer.hidden))
    squares = sums.Squares(8, layer)
    squares.see(pair, values, errors)
    passed = sums._PassSums(squares.by_moment, torch.device("cpu"), layer.hidden)
    passed.add(pair, values, errors)
    passed.end(0)
    assert getattr(passed.sum_of(pair), "features", None) == 12
