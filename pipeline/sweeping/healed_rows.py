"""The figures of healed points in the tables of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = {"loss_over_dense": ".4f", "divergence": ".3g"}  # scores of a healed point in tables, with their forms
HEALED_COLUMNS = ("healed_perplexity", "healed_loss", "healed_loss_over_dense", "healed_divergence")  # of the CSV file
NO_GAIN = "no gain"  # of a healing whose best step is the start


def healed_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a healed point by column of the CSV file; nothing for another point."""
    healed = row.get("healed") or {}
    return {column: healed.get(column.removeprefix("healed_")) for column in HEALED_COLUMNS} if healed else {}


def healed_cell(row: Mapping[str, Any], name: str, form: str) -> str:
    """Return a score of a healed point for a table; empty for another point, or if it was not measured."""
    if (healed := row.get("healed")) is None or row[name] is None:
        return ""
    if not healed["best_step"]:
        return NO_GAIN
    return "" if healed[name] is None else f"{float(healed[name]):{form}}"
