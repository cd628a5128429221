"""The table of dependencies between ledger entries."""

from __future__ import annotations

import pytest

from manifests.entries import KINDS
from pipeline.driver.ledger_dependencies import DEPENDENTS, dependents, fields_of, kind_of, retract_changed


class Retractions:
    """A journal that notes retracted keys."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def retract(self, key: str) -> None:
        self.keys.append(key)


@pytest.mark.parametrize(
    ("changed", "invalid"),
    [
        ("target", {"ranks", "layer", "statistics", "activations", "held_out_score"}),
        ("curves", {"ranks", "layer", "statistics", "activations", "held_out_score"}),
        ("held_out", {"held_out_score", "tries"}),
        ("held_out_score", set()),
    ],
)
def test_changes_reach_everything_computed_from_them(changed: str, invalid: set[str]) -> None:
    assert set(dependents([changed], "changed")) == invalid


def test_damage_reaches_what_has_to_be_computed_along() -> None:
    assert dependents(["layer"], "damaged") == []
    assert dependents(["dense.inputs"], "damaged") == []
    assert dependents(["dense.activations"], "damaged") == ["dense.activations"]
    assert dependents(["gradient"], "damaged") == ["gradient.activations", "dense.inputs"]


def test_the_table_names_kinds_and_fields_that_exist() -> None:
    names = {*DEPENDENTS, *(name for row in DEPENDENTS.values() for column in row for name in column)}
    assert {kind_of(name.partition(".")[0]) for name in names} <= {kind.removesuffix("/") for kind in KINDS}
    assert fields_of("dense/00003") == ["activations", "inputs"]
    assert fields_of("gradient/00003") == ["activations"]
    assert fields_of("layer/00003") == []


def test_the_last_computed_entries_are_retracted_first() -> None:
    """So that a crash in between leaves no entry whose origin is gone."""
    journal = Retractions()
    keys = ["dense/00000", "held_out", "held_out_score", "layer/00000", "layer/00001", "ranks", "target", "tries/0800"]
    retract_changed(journal, keys, ["target"])  # type: ignore[arg-type]
    assert journal.keys == ["held_out_score", "layer/00000", "layer/00001", "ranks", "target"]
