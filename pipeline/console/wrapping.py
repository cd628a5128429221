"""Lines broken between words where a terminal shows them: by itself, it breaks them anywhere. A path stays whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO


def wrapped(text: str, width: int) -> str:
    """Returns each line of `text` in lines of `width` at most, the later ones two columns further in."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints it on standard output, or another stream; wrapped in a terminal, as it is elsewhere."""
    stream = stream or sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    print(wrapped(text, width) if width else text, file=stream, flush=True)


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
