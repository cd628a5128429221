"""`lamina COMMAND …`: the commands `python -m pipeline.COMMAND` under one name."""

from __future__ import annotations

import ast
import runpy
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from manifests import VERSION
from pipeline.console.pipes import flushed, until_reader_leaves
from pipeline.console.printing import SCRIPT

INDENT = 4


def commands() -> dict[str, str]:
    """Return command -> description of its parser, for each module of `pipeline` that runs."""
    paths = sorted(Path(__file__).resolve().parents[1].glob("*.py"))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    return {name: _description(source) for name, source in sources.items() if "__main__" in source}


def main() -> None:
    """Run the command that the first argument names, as `python -m` does."""
    descriptions = commands()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in descriptions:
        sys.argv = [f"{SCRIPT}{name}", *sys.argv[2:]]
        runpy.run_module(f"pipeline.{name}", run_name="__main__", alter_sys=False)
        return
    sys.exit(until_reader_leaves(lambda: flushed(_answer(name, descriptions))))


def _answer(name: str, descriptions: dict[str, str]) -> int:
    """Print the answer to an argument that is not a command. Return the exit code."""
    if name in ("-h", "--help"):
        print("\n".join(_help(descriptions)))
        return 0
    if name == "--version":
        print(f"Lamina {VERSION}")
        return 0
    print("\n".join(_help(descriptions)), file=sys.stderr)
    if name:
        print(f"wrong input: {name!r} is not a command; commands are {', '.join(descriptions)}", file=sys.stderr)
    return 2


def _description(source: str) -> str:
    """Return the second argument of a module's call of `pipeline.console.arguments.parser`, without importing it."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    seconds = (call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "parser")
    return next((str(argument.value) for argument in seconds if isinstance(argument, ast.Constant)), "")


def _help(descriptions: dict[str, str]) -> Iterator[str]:
    yield "usage: lamina COMMAND …, or python -m pipeline.COMMAND …, which is the same"
    yield ""
    width = max(map(len, descriptions)) + INDENT
    for name, description in descriptions.items():
        columns = max(2 * width, shutil.get_terminal_size().columns)
        first, rest = f"  {name:{width - 2}}", " " * width
        yield textwrap.fill(description, columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    yield ""
    yield "lamina COMMAND --help lists a command's arguments; --version prints the version of Lamina"
