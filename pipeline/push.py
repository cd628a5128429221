"""`python -m pipeline.push OUTPUT REPOSITORY`: uploads a compressed checkpoint to the hub, its card with scores."""

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

from pipeline.console.arguments import parser, run_command
from pipeline.console.printing import say


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("push", "Uploads a compressed checkpoint to a model repository on the hub.")
    options.add_argument("output", help="the compressed checkpoint")
    options.add_argument("repository", help="ORGANISATION/NAME; created if it does not exist")
    options.add_argument("--private", action="store_true", help="create the repository as a private one")
    options.add_argument("--revision", help="a branch, created if it does not exist; default: the main one")
    options.add_argument(
        "--run-dir", metavar="RUN_DIR", help="the run directory of the job that wrote it; its scores go on the card"
    )
    options.add_argument(
        "--base-model", metavar="ID", help="the base model on the hub; default: the job's model.source if it is an id"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    from pipeline.checkpoint.publishing import publish  # slow import, not needed for --help

    commit = publish(
        arguments.output,
        arguments.repository,
        revision=arguments.revision,
        private=arguments.private,
        run_dir=arguments.run_dir,
        base_model=arguments.base_model,
        say=partial(say, stream=sys.stderr),
    )
    if arguments.json:
        print(json.dumps({"commit": commit}))
    else:
        say(f"done: {commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
