"""Measure the memory of a process that serves the output of a job with `budget.fit`, beside the prediction.

    python -m tools.benchmarks.served_memory MANIFEST [MANIFEST ...] [--context 512] [--sequences 4] [--dense]

Each manifest is that of a finished job. A separate process loads its output in transformers on this machine's CPU, and
takes `--sequences` prompts of `--context` tokens at once, less `--new` tokens that it then decodes. Memory is the
kernel's high-water mark of resident pages. The prediction is that of `plan` for this context, with the bytes that the
job wrote. `--dense` also measures the source. Exits 1 if a prediction is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.jobs import ROOT, environment, print_table

MOST_OFF = 0.1
PARTS = ("weights", "cache", "activations", "overhead")


def serve(checkpoint: str, sequences: int, context: int, new: int) -> int:
    """Serve random prompts in this process. Return its peak of resident bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401  # registers its classes
    from workers.memory import peak_bytes

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(3, 1000, (sequences, context - new))
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(new):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    return peak_bytes()


def predicted(manifest: str, options: argparse.Namespace, dense: bool) -> tuple[str, dict[str, Any]]:
    """Return the checkpoint of a job, or its source, and the predicted parts of its memory."""
    from manifests.fit import Fit
    from manifests.loading import load_manifest
    from pipeline.checkpoint.compression_record import read_record
    from pipeline.cost_model.serving_memory import serving_memory
    from pipeline.inputs.job_inputs import read_inputs

    inputs = read_inputs(load_manifest(manifest))
    fit = Fit(memory=1, context=options.context, sequences=options.sequences, engine="transformers", device="cpu")
    memory = serving_memory(fit, inputs.config, inputs.geometry, () if dense else inputs.methods)
    written = inputs.source_bytes if dense else read_record(inputs.manifest.output)["counts"]["bytes"]["compressed"]
    return inputs.manifest.model.source if dense else inputs.manifest.output, memory.report(written)


def measured(checkpoint: str, options: argparse.Namespace) -> int:
    """Return the peak of a process that serves a checkpoint."""
    command = [sys.executable, "-m", "tools.benchmarks.served_memory", "--serve", checkpoint]
    command += [f"--{name}={getattr(options, name)}" for name in ("context", "sequences", "new")]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return int(json.loads(ended.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or serve one checkpoint as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifests", nargs="*")
    parser.add_argument("--context", type=int, default=512, help="of each sequence, with the decoded tokens")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--new", type=int, default=4, help="decoded tokens of each sequence")
    parser.add_argument("--dense", action="store_true", help="measure the sources, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        print(json.dumps(serve(options.serve, options.sequences, options.context, options.new)))
        return 0
    rows, worst = [], 0.0
    for manifest in options.manifests:
        for dense in (True, False) if options.dense else (False,):
            checkpoint, parts = predicted(manifest, options, dense)
            peak = measured(checkpoint, options)
            off = parts["total"] / peak - 1
            worst = max(worst, abs(off))
            megabytes = (parts[name] / 1e6 for name in (*PARTS, "total"))
            rows.append(
                [Path(checkpoint).name, *(f"{each:,.0f}" for each in megabytes), f"{peak / 1e6:,.0f}", f"{off:+.1%}"]
            )
    print_table(["checkpoint", *PARTS, "predicted, MB", "peak, MB", "off by"], rows)
    return 0 if worst <= MOST_OFF else 1


if __name__ == "__main__":
    sys.exit(main())
