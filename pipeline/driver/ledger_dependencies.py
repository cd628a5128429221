"""The dependencies between ledger entries: a table of which entries become invalid together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, LOSS_RATIOS, MEASURED_PARTS, RANKS, TRIED_SIZE


class Dependents(NamedTuple):
    """The kinds of entries, or single fields of them, that become invalid with entries of one kind, in all layers.

    Attributes:
        changed: kinds computed from this kind. They become invalid when it is recomputed with other settings or text.
        damaged: kinds that are needed to recompute this kind, or that are recomputed with it, and whose data may have
            been dropped. They become invalid when data of this kind is damaged. Results computed from the damaged data
            stay valid, because recomputing gives the same data.
    """

    changed: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


# The kind of a key is its first part. KIND.FIELD is one field of its entries that may be missing alone.
# Older hidden states are dropped when newer ones are entered; stored inputs, when the backward pass has read them.
DEPENDENTS: Mapping[str, Dependents] = {
    "measured": Dependents(changed=(RANKS,)),
    "curves": Dependents(changed=(RANKS,)),
    TRIED_SIZE: Dependents(changed=(RANKS,)),
    **dict.fromkeys(MEASURED_PARTS, Dependents(changed=(LOSS_RATIOS,))),
    LOSS_RATIOS: Dependents(changed=(RANKS,)),
    RANKS: Dependents(changed=("layer",)),
    "layer": Dependents(changed=("statistics", "activations", HELD_OUT_SCORE)),
    HELD_OUT: Dependents(changed=(HELD_OUT_SCORE, "tries")),
    "dense.activations": Dependents(damaged=("dense.activations",)),
    "activations": Dependents(damaged=("activations",)),
    "gradient": Dependents(damaged=("gradient.activations", "dense.inputs")),
    "gradient.activations": Dependents(damaged=("gradient.activations", "dense.inputs")),
}


def dependents(names: Iterable[str], cause: Literal["changed", "damaged"]) -> list[str]:
    """Return the kinds, and fields of kinds, that become invalid with the named ones, directly or indirectly."""
    invalid: dict[str, None] = {}
    pending = [*names]
    while pending:
        row = DEPENDENTS.get(pending.pop(0), Dependents())
        new = [name for name in getattr(row, cause) if name not in invalid]
        invalid |= dict.fromkeys(new)
        pending += new
    return [*invalid]


def retract_changed(journal: Journal, keys: Collection[str], changed: Collection[str]) -> None:
    """Retract all `keys` of the `changed` kinds, and those that depend on them, the latest first."""
    for kind in reversed([*changed, *dependents(changed, "changed")]):
        for key in keys:
            if kind_of(key) == kind:
                journal.retract(key)


def kind_of(key: str) -> str:
    """Return the first part of a key."""
    return key.partition("/")[0]


def fields_of(key: str) -> list[str]:
    """Return the fields that an entry may lose without being retracted."""
    names = {*DEPENDENTS, *(name for row in DEPENDENTS.values() for name in row.damaged)}
    parts = [name.partition(".") for name in sorted(names)]
    return [field for kind, _, field in parts if field and kind == kind_of(key)]
