"""A case of the fuzzer, and the commands that it plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
Command = tuple[str, ...]
RUN: Command = ("run", "manifest.yaml")
SWEEP: Command = ("sweep", "manifest.yaml")
PLAN: Command = ("plan", "manifest.yaml", "--tflops", "1")
STATUS: Command = ("status", "run")
VERIFY: Command = ("verify", "output")
VERIFY_SOURCE: Command = ("verify", "output", "--source", "model")


@dataclass(frozen=True)
class Case:
    """`commands` in order; `half`: what was there before; `repairable`: the end must be the reference's bytes.

    `elsewhere`: a folder of RUN_DIR was replaced by a link, as to another disk: files are added where it leads.
    """

    what: str
    commands: Sequence[Command]
    half: str | None = None
    repairable: bool = False
    elsewhere: bool = False


def evaluate(model: str, text: str = "text.txt") -> Command:
    return ("evaluate", model, "--text", text, "--window", "16", "--json")


def write_evil(path: Path, mark: Path) -> None:
    """Python that leaves a mark when it is imported."""
    path.write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: ...\nclass Tokenizer: ...\nclass Model: ...\n")
