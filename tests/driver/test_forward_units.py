"""Units of a forward pass: which shards, from which committed hidden states, through which layers."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.entries import ActivationsEntry, DenseEntry, LayerEntry
from manifests.records import FormSpec
from pipeline.driver.forward_units import ForwardUnits, dense_entry, joined
from pipeline.driver.job_spec import Job
from pipeline.driver.ledger_keys import activations_key, dense_key, layer_key
from pipeline.units.units import ShardDone
from tests.driver.simulation import MemoryJournal, World, make_job, make_tasks

RECORDS = [
    World().store("activation", str(number)).model_copy(update={"path": f"activation/{number:032x}"})
    for number in range(6)
]


def units_of(**settings: Any) -> tuple[ForwardUnits, MemoryJournal]:
    """Return a pass of four layers and three shards, and its empty journal."""
    journal, job = MemoryJournal(World()), make_job(make_tasks(range(4)), **{"shards": 3, **settings})
    return ForwardUnits(job, journal), journal


def commit_layer(journal: MemoryJournal, layer: int) -> str:
    staged = journal.world.store_staged(layer, f"layer {layer}")
    journal.commit(layer_key(layer), LayerEntry(staged=staged, forms={"q": FormSpec(form="test", rank=1)}, groups={}))
    return staged.path


def test_every_shard_starts_from_its_own_record() -> None:
    forwards, journal = units_of()
    journal.commit(activations_key(1), ActivationsEntry(activations=tuple(RECORDS[:3])))
    units = forwards.units("compressed", 3, None, (), 1)
    assert [(unit.shard, unit.base, unit.base_record) for unit in units] == [
        (shard, 1, RECORDS[shard]) for shard in range(3)
    ]


def test_the_embeddings_have_no_record() -> None:
    forwards, _ = units_of()
    assert {unit.base_record for unit in forwards.units("dense", 2, None, (), 0)} == {None}
    assert forwards.activations("dense", 0) is None
    assert forwards.activations("compressed", 2) is None


@pytest.mark.parametrize("lineage", ["dense", "compressed"])
def test_layers_between_the_records_and_the_layer_are_replayed(lineage: Any) -> None:
    """Compressed ones as they were written, where they are entered; a dense pass goes through dense layers."""
    forwards, journal = units_of()
    path = commit_layer(journal, 1)
    (first, *_) = forwards.units(lineage, 3, None, (), 0)
    found = [staged and staged.path for staged in first.replay]
    assert found == ([None, path, None] if lineage == "compressed" else [None, None, None])


def test_a_pass_for_importance_has_the_records_of_its_shards() -> None:
    """An entry of fewer records than shards is of the shards on which importance is measured."""
    forwards, journal = units_of(importance_shards=(0, 2), propagate="compressed")
    journal.commit(dense_key(0), DenseEntry(cosine=(), statistics={}, activations=(RECORDS[0], RECORDS[1])))
    units = forwards.units("dense", 1, None, (), 1)
    assert [(unit.shard, unit.base_record) for unit in units] == [(0, RECORDS[0]), (2, RECORDS[1])]


def test_cosines_are_summed_on_the_shards_for_importance_by_the_dense_pass_alone() -> None:
    forwards, _ = units_of(importance_shards=(0, 2), propagate="dense")
    assert [unit.cosine for unit in forwards.units("dense", 1, None, (), 0)] == [True, False, True]
    assert not any(unit.cosine for unit in forwards.units("compressed", 1, None, (), 0))


def test_inputs_are_kept_for_the_backward_pass_alone() -> None:
    forwards, _ = units_of(gradient_shards=(1,))
    assert [unit.keep_inputs for unit in forwards.units("dense", 1, None, (), 0, keep=True)] == [False, True, False]
    assert not any(unit.keep_inputs for unit in forwards.units("dense", 1, None, (), 0))


@pytest.mark.parametrize(("layer", "emit", "ahead"), [(0, True, 1), (2, True, 3), (3, True, None), (0, False, None)])
def test_the_next_layer_is_read_ahead_if_its_inputs_are_emitted(layer: int, emit: bool, ahead: int | None) -> None:
    forwards, _ = units_of()
    assert {unit.ahead for unit in forwards.units("dense", layer, None, (), 0, emit=emit)} == {ahead}


def test_the_last_committed_layer() -> None:
    """Of each lineage: of the dense one, outputs of the layer before; an entry without hidden states does not count."""
    forwards, journal = units_of()
    assert forwards.last_committed("dense", 3) == forwards.last_committed("compressed", 3) == 0
    journal.commit(dense_key(1), DenseEntry(cosine=(), statistics={}, activations=tuple(RECORDS[:3])))
    journal.commit(dense_key(2), DenseEntry(cosine=(), statistics={}))
    journal.commit(activations_key(1), ActivationsEntry(activations=tuple(RECORDS[:3])))
    assert forwards.last_committed("dense", 3) == 2
    assert forwards.last_committed("dense", 2) == 2, "its own inputs"
    assert forwards.last_committed("dense", 1) == 0
    assert forwards.last_committed("compressed", 3) == 1


def done(**fields: Any) -> ShardDone:
    return ShardDone(**{"partials": {}, "cosine": None, "activation": None, "tokens": 1, **fields})


def test_parts_of_a_layer_give_its_inputs_and_its_outputs() -> None:
    """Inputs come from the first part, everything else from the last."""
    first = [done(inputs=RECORDS[shard]) for shard in (0, 1)]
    last = [done(activation=RECORDS[2 + shard], tokens=5) for shard in (0, 1)]
    assert [(each.inputs, each.activation, each.tokens) for each in joined([first, [done(), done()], last])] == [
        (RECORDS[0], RECORDS[2], 5), (RECORDS[1], RECORDS[3], 5),
    ]  # fmt: skip
    assert joined([last]) == last
    with pytest.raises(ValueError, match="shorter"):
        joined([first, last[:1]])


def test_the_entry_of_a_dense_pass() -> None:
    """Only what the pass has: cosines of some shards, and hidden states and inputs if they are stored."""
    results = [done(cosine=(1.0, 2), inputs=RECORDS[0]), done(inputs=None)]
    plain = dense_entry(results, {}, inputs=False)
    assert (plain.cosine, plain.activations, plain.inputs) == (((1.0, 2),), None, None)
    assert dense_entry(results, {}, inputs=True).inputs == (RECORDS[0], None)
    stored = dense_entry([done(activation=RECORDS[1])], {"m": RECORDS[2]}, inputs=False)
    assert (stored.activations, stored.statistics) == ((RECORDS[1],), {"m": RECORDS[2]})


def test_a_job_of_one_shard() -> None:
    forwards, _ = units_of(shards=1)
    assert isinstance(forwards.job, Job)
    assert [unit.key for unit in forwards.units("dense", 0, None, (), 0)] == ["forward/dense/0/0/dense"]
