"""`lamina COMMAND …`: the commands `python -m pipeline.COMMAND` under one name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pipeline


def commands() -> tuple[str, ...]:
    """Their names: the modules of `pipeline` that run."""
    folder = Path(pipeline.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    return tuple(sorted(files | packages))


def main() -> None:
    """Runs the command that the first argument names, as `python -m` does."""
    names = commands()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in names:
        asked = name in ("", "-h", "--help")
        print(f"usage: lamina COMMAND …\ncommands: {', '.join(names)}; each has --help", file=sys.stderr)
        if not asked:
            print(f"wrong input: {name!r} is no command", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    sys.argv = [f"lamina {name}", *sys.argv[2:]]
    runpy.run_module(f"pipeline.{name}", run_name="__main__", alter_sys=False)
