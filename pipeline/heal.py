"""`python -m pipeline.heal RUN_DIR`: trains the compressed model of a finished job against the dense one.

docs/methods.md#healing.
"""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import sys
from typing import Any

from manifests.errors import InputError
from manifests.loading import decode_document, decode_manifest, parse_manifest
from manifests.schema import Manifest
from pipeline.console.arguments import add_address, add_in_process, add_overrides, parser, run_command
from pipeline.console.paths import resolve_paths
from pipeline.driver.ledger_keys import COMPLETE, HEALED, HEALING
from pipeline.job.running import run_and_print
from stores.run_directory import MANIFEST, run_of_job


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("heal", "Trains a finished job's compressed model against the dense one. Run again, it resumes.")
    options.add_argument("run_dir", help="the run directory of the job")
    add_overrides(options)
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the summary as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    return run_and_print(arguments, healing_manifest)


def healing_manifest(arguments: Any) -> Manifest:
    """Return the manifest of a finished job, with `heal`. Raises InputError."""
    run_dir = run_of_job(arguments.run_dir)
    if not run_dir.storage.has(MANIFEST) or not {COMPLETE, HEALING, HEALED} & {*run_dir.ledger.keys()}:
        raise InputError(
            f"{run_dir.place}: the job is not finished; run it first, or give heal in its manifest, so that it is "
            "healed at its end"
        )
    at = run_dir.storage.at(MANIFEST)
    stored = decode_manifest(run_dir.storage.read(MANIFEST), at)
    overrides = [*(["heal={}"] if stored.heal is None else []), *arguments.set]
    document = decode_document(run_dir.storage.read(MANIFEST), f"manifest {at}", overrides)
    own = {"environment": [], "run_dir": run_dir.storage.address}  # the directory may have been moved or copied
    return resolve_paths(parse_manifest({**document, **own}, at), arguments.base)


if __name__ == "__main__":
    sys.exit(main())
