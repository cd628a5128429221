"""Scoring over a simulated cluster: resumption, the lifetime of stored data, damage, and other layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, FormSpec, StagedLayer
from pipeline.driver.ledger_keys import scored_key
from pipeline.driver.scheduler import Scheduler
from pipeline.driver.scoring import Scorer, Start
from pipeline.units.scores import Score, Scored, WindowForward, Windows
from tests.driver.simulation import (
    Killed,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
    commits,
    number_in,
)

LAYERS, SHARDS = 4, 2


class Keeping(WorldCleaner):
    """As a job's: some arrays stay."""

    def __init__(self, world: World, always: list[Any]) -> None:
        super().__init__(world)
        self.always = always

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        super().retain_activations((*records, *self.always))


def staged(world: World, layer: int, value: str) -> StagedLayer:
    form = FormSpec(form="test", rank=1 + layer)
    return StagedLayer(**dict(world.store_staged(layer, value)), forms={"q": form})


def make_world() -> tuple[World, Windows, list[Any]]:
    """Tokens, and two of four layers staged."""
    world = World()
    windows = Windows.even(SHARDS, SHARDS, "float32", 1, world.store("activation", "tokens"))
    layers: list[Any] = [None] * LAYERS
    for layer in (1, 3):
        layers[layer] = staged(world, layer, f"staged {layer}")
    return world, windows, layers


def make_scorer(world: World, windows: Windows, every: int = 1, order: str | int = "first") -> Scorer:
    cleaner = Keeping(world, [windows.tokens])
    scheduler = Scheduler(SimulatedPool(world, order), Recorder(world))
    return Scorer(scheduler, MemoryJournal(world), cleaner, LAYERS, every)


def scored(world: World, windows: Windows, layers: list[Any], every: int = 1, order: str | int = "first") -> Scored:
    """Beside the dense model, as a job does it."""
    scorer = make_scorer(world, windows, every, order)
    dense = scorer.states(windows, "dense", [None] * LAYERS).outputs
    scorer.cleaner.always.extend(dense)  # type: ignore[attr-defined]
    return scorer.score(windows, "made", layers, dense)


def test_all_shards_pass_a_part_of_a_layer_before_the_next() -> None:
    world, windows, layers = make_world()
    whole = scored(world, windows, layers)
    again, windows, layers = make_world()
    scorer = replace(make_scorer(again, windows), parts=lambda layer, _: (0, 1) if layer == 2 else (None,))
    dense = scorer.states(windows, "dense", [None] * LAYERS).outputs
    scorer.cleaner.always.extend(dense)  # type: ignore[attr-defined]
    assert scorer.score(windows, "made", layers, dense) == whole
    passed = [unit for unit in again.done if isinstance(unit, WindowForward) and unit.model == "dense"]
    parts = [(unit.layer, unit.part, unit.shard) for unit in passed if unit.layer in (2, 3)]
    assert parts == [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (3, None, 0), (3, None, 1)]
    assert [unit.store for unit in passed if unit.layer == 2] == [False, False, True, True]


@pytest.mark.parametrize("every", [1, 9])
def test_some_shards_are_scored_and_the_outputs_of_others_stored_in_one_pass(every: int) -> None:
    world, windows, _ = make_world()
    outputs = make_scorer(world, windows).states(windows, "dense", [None] * LAYERS).outputs
    world, windows, _ = make_world()
    scores, stored = make_scorer(world, windows, every).scores_and_outputs(windows, "dense", [None] * LAYERS, 1)
    assert [record.checksums for record in stored] == [outputs[1].checksums]
    assert len(scores) == 1
    assert isinstance(scores[0], Scored)
    passed = [unit for unit in world.done if isinstance(unit, WindowForward)]
    assert len(passed) == LAYERS * SHARDS
    assert [(unit.layer, unit.shard) for unit in passed if unit.store and unit.layer + 1 == LAYERS] == [(LAYERS - 1, 1)]
    assert [unit.shard for unit in world.done if isinstance(unit, Score)] == [0]


def test_entered_layer_by_layer() -> None:
    world, windows, layers = make_world()
    found = scored(world, windows, layers)
    dense, made = ([f"scored/{name}/0000{layer}" for layer in range(1, 5)] for name in ("dense", "made"))
    assert commits(world) == [*dense, *made[:-1]]
    assert world.passes == 2 * LAYERS * SHARDS + SHARDS  # the last layer's outputs were not stored: the head asks again
    assert (found.tokens, found.loss > 0) == (2, True)


@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize("order", ["last", 7])
def test_the_same_whatever_is_committed_and_in_which_order(every: int, order: str | int) -> None:
    expected = scored(*make_world())
    assert scored(*make_world(), every=every, order=order) == expected


def test_every_layer_is_in_the_loss() -> None:
    expected = scored(*make_world())
    for layer in range(LAYERS):
        world, windows, layers = make_world()
        layers[layer] = None if layers[layer] else staged(world, layer, "another")
        assert scored(world, windows, layers) != expected


@pytest.mark.parametrize("every", [1, 2])
def test_killed_anywhere_it_goes_on_there(every: int) -> None:
    clean, windows, layers = make_world()
    expected = scored(clean, windows, layers, every)
    fuel = 0
    while True:
        world, windows, layers = make_world()
        world.fuel = fuel
        try:
            scored(world, windows, layers, every)
        except Killed:
            world.fuel = None
            assert scored(world, windows, layers, every) == expected
            # again at most what lies between two commits, whose nth layer is n passes here, and what leads to the head
            assert world.passes <= clean.passes + SHARDS * (every * (every + 1) // 2 + every), fuel
            fuel += 1
        else:
            break
    assert fuel > 25


@pytest.mark.parametrize("every", [1, 2])
def test_damaged_hidden_states_are_made_again(every: int) -> None:
    """All but the dense outputs: what names these is the caller's."""
    clean, windows, layers = make_world()
    expected = scored(clean, windows, layers, every)
    outputs = [number for number, (path, _) in enumerate(clean.values.items()) if path in clean.stores["activation"]]
    mended = 0
    for number in range(len(make_world()[0].values), len(clean.values)):
        world, windows, layers = make_world()
        world.damaged = frozenset({number})
        if number in outputs[1 : 1 + SHARDS]:
            with pytest.raises(CorruptError, match=f"activation/{number:032x}"):
                scored(world, windows, layers, every)
        else:
            assert scored(world, windows, layers, every) == expected
            mended += len(world.repairs)
    assert mended == 2 * (LAYERS // every - 1) * SHARDS


def test_what_a_worker_has_lost_is_made_again() -> None:
    expected = scored(*make_world())
    world, windows, layers = make_world()
    scorer = make_scorer(world, windows)
    dense = scorer.states(windows, "dense", [None] * LAYERS).outputs
    scorer.cleaner.always.extend(dense)  # type: ignore[attr-defined]
    scorer.scheduler.pool.fail_on["windowforward/made/2/1"] = LostInputError("spilled hidden states are damaged")  # type: ignore[attr-defined]
    assert scorer.score(windows, "made", layers, dense) == expected
    assert len(world.repairs) == 1


def test_damage_that_nobody_here_made_is_raised() -> None:
    world, windows, layers = make_world()
    world.damaged = frozenset({number_in(layers[1].path)})
    with pytest.raises(CorruptError, match="damaged"):
        make_scorer(world, windows).score(windows, "made", layers)
    world, windows, layers = make_world()
    world.damaged = frozenset({0})
    with pytest.raises(CorruptError, match="damaged"):
        make_scorer(world, windows).score(windows, "made", layers)


@pytest.mark.parametrize("change", ["staged", "dtype", "tokens"])
def test_what_is_left_of_another_model_is_not_gone_on_with(change: str) -> None:
    """Under the same name: other layers, other windows."""
    world, windows, layers = make_world()
    make_scorer(world, windows).score(windows, "made", layers)
    if change == "staged":
        layers[1] = staged(world, 1, "another")
    elif change == "dtype":
        windows = Windows.even(SHARDS, SHARDS, "float64", 1, windows.tokens)
    else:
        windows = Windows.even(SHARDS, SHARDS, "float32", 1, world.store("activation", "others"))  # type: ignore[arg-type]
    before = len(world.done)
    found = make_scorer(world, windows).score(windows, "made", layers)
    begun = [unit.layer for unit in world.done[before:] if isinstance(unit, WindowForward)]
    assert begun == [layer for layer in range(LAYERS) for _ in range(SHARDS)]
    assert world.repairs == []
    clean = World()
    clean.values, clean.stores = dict(world.values), {kind: dict(held) for kind, held in world.stores.items()}
    assert make_scorer(clean, windows).score(windows, "made", layers) == found


def test_one_layer_of_hidden_states_is_kept() -> None:
    world, windows, layers = make_world()
    most = 0

    class Watching(SimulatedPool):
        def wait(self) -> Any:
            nonlocal most
            most = max(most, len(self.world.stores["activation"]))
            return super().wait()

    scorer = make_scorer(world, windows)
    watched = Scheduler(Watching(world), scorer.scheduler.observer)
    Scorer(watched, scorer.journal, scorer.cleaner, LAYERS).score(windows, "made", layers)
    assert most == 1 + 2 * SHARDS - 1  # the tokens, a layer's inputs, and its outputs but the last


def test_forgotten_without_a_trace() -> None:
    world, windows, layers = make_world()
    scorer = make_scorer(world, windows)
    scorer.score(windows, "made", layers)
    assert world.entries
    scorer.forget("made")
    assert world.entries == {}
    assert list(world.stores["activation"].values()) == ["tokens"]


def test_workers_forget_what_they_hold_of_other_models() -> None:
    """Without that, a worker that takes over a shard would use the hidden states of another model."""
    world, windows, layers = make_world()
    scorer = make_scorer(world, windows)
    for name in ("one", "two"):
        scorer.score(windows, name, layers)
    assert [event for event, key in world.events if event == "forget" or key == "windowforward/two/0/0"] == [
        "forget",
        "forget",
        "unit",
    ]


def test_a_name_is_one_of_the_ledgers() -> None:
    with pytest.raises(AssertionError):
        scored_key("a/b", 0)


def test_losses_of_shards_are_added() -> None:
    one, other = Scored(1.0, 2, 3.0, 4.0), Scored(10.0, 20, 30.0, 40.0)
    assert one + other == Scored(11.0, 22, 33.0, 44.0)


def test_the_head_is_asked_once_for_each_shard() -> None:
    world, windows, layers = make_world()
    make_scorer(world, windows, every=2).score(windows, "made", layers)
    heads = [unit for unit in world.done if isinstance(unit, Score)]
    assert [(unit.shard, unit.layer, unit.base) for unit in heads] == [(0, LAYERS, 2), (1, LAYERS, 2)]


def test_a_pass_begins_with_the_kept_inputs_of_another_model() -> None:
    world, windows, layers = make_world()
    whole = scored(world, windows, layers)
    again, windows, layers = make_world()
    scorer = make_scorer(again, windows, every=LAYERS)
    states = scorer.states(windows, "dense", [None] * LAYERS, {1})
    records = [*states.outputs, *states.inputs[1]]
    assert states.inputs.keys() == {1}
    scorer.cleaner.always.extend(records)  # type: ignore[attr-defined]
    scorer.forget("dense")
    assert scorer.score(windows, "made", layers, states.outputs, Start(1, states.inputs[1])) == whole
    passed = [unit.layer for unit in again.done if isinstance(unit, WindowForward) and unit.model == "made"]
    assert sorted({*passed}) == [*range(1, LAYERS)]


def test_kept_inputs_outlast_the_commits_of_later_layers() -> None:
    world, windows, _ = make_world()
    scorer = make_scorer(world, windows, every=1)
    states = scorer.states(windows, "dense", [None] * LAYERS, {1, 3})
    assert states.inputs.keys() == {1, 3}
    kept = [record for records in states.inputs.values() for record in records]
    scorer.cleaner.always.extend([*states.outputs, *kept])  # type: ignore[attr-defined]
    scorer.forget("dense")
    for start in (1, 3):
        made = [staged(world, layer, "new") if layer >= start else None for layer in range(LAYERS)]
        begun = scorer.score(windows, "made", made, states.outputs, Start(start, states.inputs[start]))
        scorer.forget("made")
        assert begun == scorer.score(windows, "made", made, states.outputs)
        scorer.forget("made")
