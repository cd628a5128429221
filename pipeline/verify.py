"""`python -m pipeline.verify OUTPUT [--source DIR]`: checks a checkpoint against its record, and against its source."""

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
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.compression_record import existing_checkpoint
from pipeline.console.arguments import parser, run_command
from pipeline.console.printing import say

if TYPE_CHECKING:
    from pipeline.verification.runner import Finding

FAULTS_SHOWN = 10


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser(
        "verify",
        "Checks digests, contents, forms, values and counts, and with --source also coverage, layers and logits.",
    )
    options.add_argument("output", help="the compressed checkpoint")
    options.add_argument("--source", help="the dense checkpoint that it was made from")
    options.add_argument(
        "--bound",
        type=float,
        help="largest relative error of logits and of a layer; default 1.0; give about 0.001 if nothing was removed",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    output = existing_checkpoint(arguments.output)
    from pipeline.verification.runner import verify  # slow import, only for a checkpoint

    findings = []
    for finding in verify(output, arguments.source, arguments.bound):
        findings.append(finding)
        if not arguments.json:
            _print(finding)
    passed = not any(finding.faults for finding in findings)
    if arguments.json:
        print(json.dumps({"passed": passed, "findings": [vars(finding) for finding in findings]}))
    else:
        say("verified" if passed else "NOT verified")
    return 0 if passed else 1


def _print(finding: Finding) -> None:
    say(f"{'FAULT' if finding.faults else 'ok':>5}  {finding.check}: {finding.detail}")
    for fault in finding.faults[:FAULTS_SHOWN]:
        say(f"       {fault}")
    if len(finding.faults) > FAULTS_SHOWN:
        say(f"       ... and {len(finding.faults) - FAULTS_SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
