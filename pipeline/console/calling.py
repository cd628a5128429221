"""Spells commands in output as this process was called: `python -m pipeline.run`, or `lamina run`.

Messages in the code name modules, which also run in a checkout; `lamina` exists where the package is installed.
"""

from __future__ import annotations

import sys

MODULE = "python -m pipeline."
SCRIPT = "lamina "


def as_called(text: str) -> str:
    """Return a text with commands spelled as this process was called."""
    return text.replace(MODULE, SCRIPT) if sys.argv[0].startswith(SCRIPT) else text
