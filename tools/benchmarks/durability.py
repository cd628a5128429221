"""What being interruptible costs, and what it saves: `resume.every` against never, other budgets against starting over.

    python -m tools.benchmarks.durability [MODEL --text FILE] [--rounds 2]

Prints the seconds of a walk with hidden states committed every layer, every 4 layers and never, as ratios to never (the
best of some interleaved rounds), and the seconds of a job that solves again from the statistics of a dense pass.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.benchmarks.jobs import SHARED, end_on_sigterm, print_table, run_manifest

EVERY = {"every layer": 1, "every 4 layers": 4, "never": 10_000}


def walking_seconds(summary: Mapping[str, Any]) -> float:
    """Of the phases that go through the layers: no start, no assembling."""
    stages = ("checks", "start", "assemble", "evaluate")
    return sum(spent for name, spent in summary["seconds"]["phases"].items() if name not in stages)


def main() -> int:
    """The benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default=str(SHARED / "models" / "wiki-llama-gqa-8m"))
    options.add_argument("--text", default=str(SHARED / "text" / "wikitext2_valid.txt"))
    options.add_argument("--rounds", type=int, default=2)
    arguments = options.parse_args()
    end_on_sigterm()
    walks: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        manifest: dict[str, Any] = {
            "version": 1,
            "model": {"source": arguments.model},
            "output": f"{scratch}/output",
            "run_dir": f"{scratch}/run",
            "budget": {"keep": 0.7},
            "methods": [{"method": "flat_llm"}],
            "calibration": {
                "propagate": "compressed",
                "text": {"files": [arguments.text]},
                "samples": 128,
                "sequence_length": 256,
                "shards": 8,
                "micro_batch": 16,
            },
        }
        for _ in range(arguments.rounds):
            for name, every in EVERY.items():
                summary = run_manifest({**manifest, "resume": {"every": every}}, root)
                walks[name].append(walking_seconds(summary))
        floor = min(walks["never"])
        rows = [(name, f"{min(found):.2f}", f"{min(found) / floor:.3f}") for name, found in walks.items()]
        print_table(("hidden states committed", "seconds, best", "ratio to never"), rows)
        dense = {**manifest, "calibration": {**manifest["calibration"], "propagate": "dense"}}
        first = walking_seconds(run_manifest(dense, root))
        other = {**dense, "budget": {"keep": 0.5}, "output": f"{scratch}/other"}
        again = run_manifest(other, root, fresh=False)
        saved, second = again["seconds_saved"], walking_seconds(again)
        print(f"\ndense pass and solving {first:.1f} s; another budget {second:.1f} s, {saved:.1f} s of forward less")
    return 0


if __name__ == "__main__":
    sys.exit(main())
