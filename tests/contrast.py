"""Computes the contrast of two colours by WCAG 2."""

from __future__ import annotations

import re


def contrast(one: str, other: str) -> float:
    """Return the contrast, from 1 to 21, of two colours `rgb(R, G, B)` or `#RRGGBB`."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    hexadecimal = colour.startswith("#")
    parts = re.findall("[0-9a-f]{2}" if hexadecimal else r"\d+", colour)[:3]
    shares = [int(part, 16 if hexadecimal else 10) / 255 for part in parts]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
