"""A view of a job's ledger after its healing: its layers are the healed ones, and it has its own figures that compare
both models."""

from __future__ import annotations

from typing import Any

from manifests.entries import KINDS, HealedEntry, LayerEntry
from manifests.records import E, LedgerKey
from pipeline.driver.ledger_dependencies import kind_of
from pipeline.driver.ledger_keys import COMPARED, HELD_OUT_SCORE
from stores.ledger import Ledger, LedgerView

OWN = "after_healing"
OWN_KINDS = (COMPARED, HELD_OUT_SCORE)


class HealedLedger(LedgerView):
    """A view of a job's ledger. Everything but the layers and `OWN_KINDS` is the job's."""

    def __init__(self, whole: Ledger, healed: HealedEntry) -> None:
        super().__init__(whole, OWN, {kind: "" for kind in KINDS if kind not in OWN_KINDS})
        self.healed = healed

    def get(self, key: LedgerKey[E]) -> E | None:
        entry: Any = super().get(key)
        layer = key.rpartition("/")[2]
        if isinstance(entry, LayerEntry) and (staged := self.healed.layers.get(str(int(layer)))):
            entry = entry.model_copy(update={"staged": staged})
        return entry  # type: ignore[no-any-return] # of the key's class

    def keys(self, prefix: str = "") -> list[LedgerKey[Any]]:
        """Return the committed keys that begin with `prefix`, ascending."""
        job = [key for key in self.whole.keys(prefix) if kind_of(key) not in (OWN, *OWN_KINDS)]
        return sorted([*job, *super().keys(prefix)])


def forget_figures(ledger: Ledger) -> None:
    """Retract the figures of an earlier healing."""
    for key in ledger.keys(f"{OWN}/"):
        ledger.retract(key)
