"""`python -m pipeline.export OUTPUT --to dense|stock|gguf DEST`: for engines that know nothing of our code."""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from typing import Any

from pipeline.console.arguments import parser, run_command
from pipeline.console.signals import interrupt_on_signals
from pipeline.console.wrapping import say


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = parser("export", "Writes a compressed checkpoint as an ordinary one of its source's family.")
    options.add_argument("output", help="the compressed checkpoint")
    options.add_argument(
        "--to",
        choices=("dense", "stock", "gguf"),
        required=True,
        help="dense: multiplied back, in the source's shapes; stock: MLPs stay narrow where all layers have one "
        "width; gguf: a file for llama.cpp, MLPs at their own widths, without vocabulary",
    )
    options.add_argument("destination", help="a directory that holds nothing yet, or for gguf a file")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    interrupt_on_signals(threading.Event())  # so that what was begun is removed
    from pipeline.checkpoint.exporting import export_checkpoint  # takes seconds, which --help need not
    from pipeline.checkpoint.gguf_file import export_gguf

    note = partial(say, stream=sys.stderr)
    if arguments.to == "gguf":
        written = export_gguf(arguments.output, arguments.destination, note)
    else:
        written = export_checkpoint(arguments.output, arguments.to, arguments.destination, note)
    if arguments.json:
        print(json.dumps(written))
    else:
        ratio = written["bytes"] / written["bytes_before"]
        say(
            f"{arguments.destination}: {written['parameters']:,} numbers, {written['bytes']:,} bytes, "
            f"{ratio:.3f} times the compressed checkpoint's"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
