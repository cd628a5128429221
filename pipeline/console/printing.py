"""Prints messages: commands are spelled as this process was called, and a terminal gets lines wrapped between words.

Messages in the code name modules, which also run in a checkout; `lamina` exists where the package is installed. A path
stays whole.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

MODULE = "python -m pipeline."
SCRIPT = "lamina "


def as_called(text: str) -> str:
    """Return a text with commands spelled as this process was called."""
    return text.replace(MODULE, SCRIPT) if sys.argv[0].startswith(SCRIPT) else text


def wrapped(text: str, width: int) -> str:
    """Wrap each line of `text` to `width` columns; continued lines are indented by two."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a text on standard output, or another stream; wrap it if that is a terminal.

    Commands are spelled as this process was called.
    """
    text = as_called(text)
    stream = stream or sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    print(wrapped(text, width) if width else text, file=stream, flush=True)


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
