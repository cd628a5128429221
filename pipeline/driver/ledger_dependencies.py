"""The dependencies between ledger entries: one table says which become invalid together with others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, RANKS, TARGET


class Dependents(NamedTuple):
    """Kinds of entries that become invalid together with another kind, or single fields of them, in all layers.

    Attributes:
        changed: computed from the other kind; invalid when that is computed from other settings or from other text.
        damaged: needed to compute the other kind again, or one with it, and dropped in part since; invalid when data
            that the other kind names is damaged. An entry that is computed again is the same as before, so that what
            was computed from it stays valid.
    """

    changed: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


# The kind of a key is its first part; KIND.FIELD is one field of its entries, which may be missing by itself.
# Older hidden states are dropped when newer ones are entered, and stored inputs when the backward pass has read them.
DEPENDENTS: Mapping[str, Dependents] = {
    "measured": Dependents(changed=(RANKS,)),
    "curves": Dependents(changed=(RANKS,)),
    TARGET: Dependents(changed=(RANKS,)),
    RANKS: Dependents(changed=("layer",)),
    "layer": Dependents(changed=("statistics", "activations", HELD_OUT_SCORE)),
    HELD_OUT: Dependents(changed=(HELD_OUT_SCORE, "tries")),
    "dense.activations": Dependents(damaged=("dense.activations",)),
    "activations": Dependents(damaged=("activations",)),
    "gradient": Dependents(damaged=("gradient.activations", "dense.inputs")),
    "gradient.activations": Dependents(damaged=("gradient.activations", "dense.inputs")),
}


def dependents(names: Iterable[str], cause: Literal["changed", "damaged"]) -> list[str]:
    """Returns the kinds, and single fields of kinds, that become invalid with those of these names, directly or not."""
    invalid: dict[str, None] = {}
    pending = [*names]
    while pending:
        row = DEPENDENTS.get(pending.pop(0), Dependents())
        new = [name for name in getattr(row, cause) if name not in invalid]
        invalid |= dict.fromkeys(new)
        pending += new
    return [*invalid]


def retract_changed(journal: Journal, keys: Collection[str], changed: Collection[str]) -> None:
    """Retracts those of `keys` that are of the `changed` kinds or depend on them, the last computed ones first."""
    for kind in reversed([*changed, *dependents(changed, "changed")]):
        for key in keys:
            if kind_of(key) == kind:
                journal.retract(key)


def kind_of(key: str) -> str:
    """Returns the first part of a key."""
    return key.partition("/")[0]


def fields_of(key: str) -> list[str]:
    """Returns the fields that an entry may lose without being retracted."""
    names = {*DEPENDENTS, *(name for row in DEPENDENTS.values() for name in row.damaged)}
    parts = [name.partition(".") for name in sorted(names)]
    return [field for kind, _, field in parts if field and kind == kind_of(key)]
