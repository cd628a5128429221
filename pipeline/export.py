"""`python -m pipeline.export OUTPUT --to dense|stock|gguf DEST`: writes a checkpoint for engines without our code."""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import sys
from functools import partial
from typing import Any

from manifests.errors import InputError
from pipeline.console.arguments import parser, run_command
from pipeline.console.printing import say


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("export", "Writes a compressed checkpoint as an ordinary one of its source's family.")
    options.add_argument("output", help="the compressed checkpoint")
    options.add_argument(
        "--to",
        choices=("dense", "stock", "gguf"),
        required=True,
        help="dense: factors multiplied, in the source's shapes; stock: narrower MLPs, if all layers have one width; "
        "gguf: a file for llama.cpp, each MLP at its own width",
    )
    options.add_argument("destination", help="an empty or new directory; for gguf a new file")
    options.add_argument(
        "--multiply-out",
        action="store_true",
        help="for stock and gguf: store matrices with tables of levels unrounded; for stock, all matrices if "
        "transformers cannot read the codes of experts",
    )
    options.add_argument(
        "--float32",
        action="store_true",
        help="gguf: store matrices without codes in float32, so that nothing is rounded",
    )
    options.add_argument(
        "--embeddings-q8",
        action="store_true",
        help="gguf: store token embeddings and the head as Q8_0, unless they have codes",
    )
    options.add_argument("--no-vocabulary", action="store_true", help="gguf: token ids instead of text")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    from pipeline.checkpoint.exporting import export_checkpoint  # slow import, not needed for --help
    from pipeline.checkpoint.gguf_file import export_gguf

    note = partial(say, stream=sys.stderr)
    for option in ("no_vocabulary", "float32", "embeddings_q8"):
        if getattr(arguments, option) and arguments.to != "gguf":
            raise InputError(f"--{option.replace('_', '-')} goes with --to gguf, not with --to {arguments.to}")
    if arguments.float32 and arguments.embeddings_q8:
        raise InputError("--float32 stores what has no codes unrounded; leave out --embeddings-q8")
    if arguments.to == "gguf":
        words = not arguments.no_vocabulary
        whole = arguments.multiply_out, words, arguments.float32, arguments.embeddings_q8
        written = export_gguf(arguments.output, arguments.destination, note, *whole)
    else:
        target, destination = arguments.to, arguments.destination
        written = export_checkpoint(arguments.output, target, destination, note, arguments.multiply_out)
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
