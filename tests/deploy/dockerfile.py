"""Reads a Dockerfile as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """An instruction: its keyword, such as `RUN`, and its arguments on one line."""

    name: str
    value: str


def read_dockerfile(path: Path) -> list[Instruction]:
    """Return the instructions in order, without comments, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def copied(instructions: list[Instruction]) -> list[tuple[list[str], str]]:
    """Return (sources in the repository, target in the image) of each COPY."""
    found = []
    for instruction in instructions:
        if instruction.name == "COPY":
            *sources, target = [part for part in instruction.value.split() if not part.startswith("--")]
            found.append((sources, target))
    return found
