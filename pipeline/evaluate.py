"""`python -m pipeline.evaluate MODEL --text FILE… --tasks TASK…`: perplexity, streamed, and lm-eval tasks."""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import deferred_signals, exit_on_signals, interrupt_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args

from manifests.calibration import Prefix
from manifests.errors import InputError
from manifests.loading import parse_block
from manifests.records import Record
from manifests.schema import Perplexity, Workers
from pipeline.console.arguments import (
    add_address,
    add_in_process,
    add_text,
    check_in_process,
    parser,
    run_command,
    text_of,
)
from pipeline.console.paths import prepare_folder
from pipeline.console.wrapping import say
from pipeline.evaluation.losses import score_extent, shown_perplexity
from pipeline.evaluation.task_scores import score_tasks, task_lines
from pipeline.inputs.task_names import check_tasks

DTYPES = ("bfloat16", "float16", "float32", "stored")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("evaluate", "Measures perplexity, one layer in memory at a time, and scores of lm-eval's tasks.")
    options.add_argument("model", help="directory of a dense or compressed checkpoint, or a hub id")
    add_text(options, ": perplexity")
    options.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="lm-eval's by name, or YAML files; this process loads the whole model",
    )
    options.add_argument(
        "--beside", metavar="MODEL", help="with --tasks: another model in the same table, such as the dense one"
    )
    options.add_argument("--limit", type=int, help="with --tasks: score only the first so many documents of each")
    options.add_argument("--batch", type=int, default=1, help="with --tasks: sequences in a batch")
    options.add_argument(
        "--trust-remote-code", action="store_true", help="run a tokenizer that is Python in the checkpoint"
    )
    options.add_argument(
        "--accept-loss", action="store_true", help="score a dense model with random weights, however large its loss"
    )
    options.add_argument("--window", type=int, default=2048, help="tokens in a window, those of the prefix included")
    options.add_argument(
        "--prefix",
        choices=get_args(Prefix),
        default="tokenizer",
        help="what a window begins with: the ids that the tokenizer puts before a text, or none; not scored",
    )
    options.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the forward pass; the log-softmax is always float32"
    )
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--cpus", type=int, default=1, help="threads of a worker")
    options.add_argument("--gpus", type=float, default=0, help="GPUs of a worker")
    options.add_argument(
        "--scratch",
        type=Path,
        help="folder for hidden states beyond a worker's memory; default: its node's temporary folder",
    )
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    if not (arguments.text or arguments.tasks):
        raise InputError("give --text, --tasks, or both")
    for name in ("window", "workers", "cpus"):
        if getattr(arguments, name) < (2 if name == "window" else 1):
            raise InputError(f"--{name}: {getattr(arguments, name)} is too small")
    if arguments.in_process:
        check_in_process(arguments.address, arguments.workers, "--workers")
    if arguments.tasks:
        check_tasks(arguments.tasks, "--tasks", [model for model in (arguments.model, arguments.beside) if model])
    if arguments.scratch:
        prepare_folder("--scratch", str(arguments.scratch))
    score: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    try:  # a failure must not lose the scores before it
        if arguments.text:
            score = _perplexity(arguments)
            if not arguments.json:
                perplexity = shown_perplexity(score["perplexity"], score["loss"])
                say(f"{arguments.model}: perplexity {perplexity} over {score_extent(score)}")
        for model in (arguments.model, arguments.beside) if arguments.tasks else ():
            if model:
                tasks[model] = _scored_tasks(arguments, model)
    finally:
        if arguments.json and (score or tasks):
            by_task = {"tasks": tasks} if tasks else {}
            print(json.dumps({"model": arguments.model, **score, **by_task}, default=Record.as_json))
        elif tasks:
            say("\n".join(task_lines(tasks)))
    return 0


def _scored_tasks(arguments: Any, model: str) -> Any:
    with redirect_stdout(sys.stderr):
        return score_tasks(
            model,
            arguments.tasks,
            "--tasks",
            dtype="auto" if arguments.dtype == "stored" else arguments.dtype,
            batch=arguments.batch,
            limit=arguments.limit,
            trust_remote_code=arguments.trust_remote_code,
        )


def _perplexity(arguments: Any) -> dict[str, Any]:
    asked = Perplexity(text=text_of(arguments), window=arguments.window, prefix=arguments.prefix)
    workers = parse_block(
        Workers, {"max": arguments.workers, "cpus": arguments.cpus, "gpus": arguments.gpus}, "--workers, --cpus, --gpus"
    )
    import torch  # slow imports, only after the options are checked

    from pipeline.console.progress import JobObserver
    from pipeline.evaluation.perplexity import Scoring, measure_perplexity
    from workers.in_process_pool import check_device

    stop = threading.Event()

    def connect_workers() -> None:
        if arguments.in_process:
            check_device(workers)
            return
        from workers.cluster import connect  # imports Ray

        with deferred_signals(stop):
            connect(arguments.address, workers, arguments.connect_timeout, stop.is_set)

    interrupt_on_signals(stop)
    with redirect_stdout(sys.stderr), JobObserver(quiet=arguments.json) as observer:  # Ray prints to stdout
        dtype = None if arguments.dtype == "stored" else getattr(torch, arguments.dtype)
        return measure_perplexity(
            arguments.model,
            asked,
            Scoring(workers, dtype, stop, observer, arguments.scratch, arguments.in_process, arguments.accept_loss),
            start=connect_workers,
            trust_remote_code=arguments.trust_remote_code,
        )


if __name__ == "__main__":
    sys.exit(main())
