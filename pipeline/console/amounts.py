"""Formats durations and sizes for people."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days, whichever gives a small number."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    if seconds < 100 * MINUTE:
        return f"{seconds / MINUTE:.0f} min"
    if seconds < 72 * HOUR:
        return f"{seconds / HOUR:.1f} hours"
    return f"{seconds / DAY:,.1f} days"


def amount_of_bytes(num_bytes: float) -> str:
    """Format a number of bytes in the unit that leaves at most three digits before the point."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "bytes" else f"{num_bytes:.0f} bytes"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
