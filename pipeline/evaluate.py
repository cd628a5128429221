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
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from manifests.calibration import Prefix
from manifests.errors import InputError
from manifests.evaluation import Perplexity
from manifests.loading import parse_block
from manifests.records import Record
from manifests.schema import Workers
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
from pipeline.console.printing import say
from pipeline.evaluation.losses import score_extent, shown_perplexity
from pipeline.evaluation.task_scores import AskedTasks, score_endpoint, score_whole, task_lines
from pipeline.inputs.task_names import check_tasks
from stores.run_directory import has_begun
from stores.storage import is_address, open_storage

if TYPE_CHECKING:
    from pipeline.evaluation.perplexity import Scoring

DTYPES = ("bfloat16", "float16", "float32", "stored")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("evaluate", "Measures perplexity, one layer in memory at a time, and scores of lm-eval's tasks.")
    options.add_argument("model", help="directory of a dense or compressed checkpoint, or a hub id")
    add_text(options, ": perplexity")
    _add_task_options(options)
    options.add_argument(
        "--trust-remote-code", action="store_true", help="run a tokenizer that is Python in the checkpoint"
    )
    options.add_argument(
        "--accept-loss", action="store_true", help="score a dense model with random weights, however large its loss"
    )
    options.add_argument("--window", type=int, default=2048, help="tokens in a window with its prefix; default: 2048")
    options.add_argument(
        "--prefix",
        choices=get_args(Prefix),
        default="tokenizer",
        help="what a window begins with: the ids that the tokenizer puts before a text, or none; not scored",
    )
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the forward pass, float32 by default; the log-softmax is always float32",
    )
    options.add_argument("--workers", type=int, default=1, help="processes that share the windows; default: 1")
    options.add_argument("--cpus", type=int, default=1, help="threads of a worker")
    options.add_argument("--gpus", type=float, default=0, help="GPUs of a worker")
    options.add_argument(
        "--scratch",
        type=_disk_path,
        help="folder for hidden states beyond a worker's memory; default: its node's temporary folder",
    )
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return run_command(_body, options.parse_args(argv))


def _add_task_options(options: ArgumentParser) -> None:
    """Add the arguments of tasks."""
    options.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="lm-eval's tasks and groups by name, or YAML files; one layer in memory at a time",
    )
    options.add_argument(
        "--beside", metavar="MODEL", help="with --tasks: another model in the same table, such as the dense one"
    )
    options.add_argument("--limit", type=int, help="with --tasks: score at most this many documents of each")
    options.add_argument("--num-fewshot", type=int, help="with --tasks: answered documents before each question")
    options.add_argument(
        "--apply-chat-template", action="store_true", help="with --tasks: write contexts by the model's chat template"
    )
    options.add_argument(
        "--samples",
        type=_disk_path,
        metavar="FILE",
        help="with --tasks: write a line of JSON for each document to this file",
    )
    options.add_argument(
        "--run-dir",
        metavar="DIR",
        help="with --tasks: a directory, or s3://BUCKET/FOLDER, that keeps hidden states after each layer; the same "
        "command then resumes",
    )
    options.add_argument("--every", type=int, default=1, help="with --run-dir: number of layers between two commits")
    whole = options.add_mutually_exclusive_group()
    whole.add_argument(
        "--whole-model",
        action="store_true",
        help="with --tasks: load the whole model over this node's GPUs, memory and disk, as tasks that generate need",
    )
    whole.add_argument(
        "--endpoint", metavar="URL", help="with --tasks: ask a running server of OpenAI's completions, such as vLLM's"
    )
    options.add_argument(
        "--batch",
        type=int,
        default=1,
        help="with --whole-model: sequences in a batch; with --endpoint: requests at once",
    )


def _disk_path(text: str) -> Path:
    """Return the path of an option. Raises ArgumentTypeError for the address of a bucket."""
    if is_address(text):
        raise ArgumentTypeError(f"{text}: is the address of a bucket; give a path on a disk")
    return Path(text)


def _body(arguments: Any) -> int:
    if not (arguments.text or arguments.tasks):
        raise InputError("give --text, --tasks, or both")
    for name in ("window", "workers", "cpus"):
        if getattr(arguments, name) < (2 if name == "window" else 1):
            raise InputError(f"--{name}: {getattr(arguments, name)} is too small")
    if arguments.in_process:
        check_in_process(arguments.address, arguments.workers, "--workers")
    _check_task_options(arguments)
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


def _check_task_options(arguments: Any) -> None:
    """Check the options for tasks before anything is loaded. Raises InputError."""
    elsewhere = "--endpoint" if arguments.endpoint else "--whole-model" if arguments.whole_model else ""
    alone = ("beside", "limit", "num_fewshot", "apply_chat_template", "samples", "run_dir", "whole_model", "endpoint")
    if not arguments.tasks:
        if refused := [f"--{name.replace('_', '-')}" for name in alone if getattr(arguments, name)]:
            raise InputError(f"{', '.join(refused)}: only with --tasks")
        return
    for name, least in {"every": 1, "batch": 1, "limit": 1, "num_fewshot": 0}.items():
        if (value := getattr(arguments, name)) is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')}: {value} is too small")
    if elsewhere and arguments.run_dir:
        raise InputError(f"--run-dir {arguments.run_dir}: nothing is kept with {elsewhere}; give one of the two")
    if arguments.run_dir and has_begun(open_storage(arguments.run_dir)):
        raise InputError(
            f"--run-dir {arguments.run_dir}: the run directory of a job or sweep; give a new folder, or that of an "
            "earlier `evaluate`"
        )
    if arguments.endpoint and arguments.beside:
        raise InputError(f"--beside {arguments.beside}: one server answers for one model; leave out one of the two")
    models = [model for model in (arguments.model, arguments.beside) if model]
    check_tasks(arguments.tasks, "--tasks", models if elsewhere else None)
    if arguments.samples:
        prepare_folder("--samples", str(arguments.samples.absolute().parent))
        arguments.samples.unlink(missing_ok=True)


def _scored_tasks(arguments: Any, model: str) -> Any:
    asked = AskedTasks(
        tuple(arguments.tasks),
        "--tasks",
        arguments.limit,
        arguments.num_fewshot,
        arguments.apply_chat_template,
        arguments.samples,
    )
    trusted = arguments.trust_remote_code
    if arguments.endpoint:
        with redirect_stdout(sys.stderr):
            return score_endpoint(arguments.endpoint, model, asked, arguments.batch, trusted)
    if arguments.whole_model:
        dtype = "auto" if arguments.dtype == "stored" else arguments.dtype
        with redirect_stdout(sys.stderr):
            return score_whole(model, asked, dtype, arguments.batch, trusted)
    from pipeline.evaluation.streamed_tasks import kept_in, score_streamed

    with _scoring(arguments) as (scoring, start), kept_in(arguments.run_dir, arguments.every) as kept:
        return score_streamed(model, asked, scoring, start=start, kept=kept, trust_remote_code=trusted)


def _perplexity(arguments: Any) -> dict[str, Any]:
    asked = Perplexity(text=text_of(arguments), window=arguments.window, prefix=arguments.prefix)
    from pipeline.evaluation.perplexity import measure_perplexity

    with _scoring(arguments) as (scoring, start):
        return measure_perplexity(
            arguments.model, asked, scoring, start=start, trust_remote_code=arguments.trust_remote_code
        )


@contextmanager
def _scoring(arguments: Any) -> Iterator[tuple[Scoring, Callable[[], None]]]:
    """Yield the settings of workers, and a function that connects to them."""
    workers = parse_block(
        Workers, {"max": arguments.workers, "cpus": arguments.cpus, "gpus": arguments.gpus}, "--workers, --cpus, --gpus"
    )
    import torch  # slow imports, only after the options are checked

    from pipeline.console.progress import JobObserver
    from pipeline.evaluation.perplexity import Scoring
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
    dtype = None if arguments.dtype == "stored" else getattr(torch, arguments.dtype)
    with redirect_stdout(sys.stderr), JobObserver(quiet=arguments.json) as observer:  # Ray prints to stdout
        scoring = Scoring(
            workers, dtype, stop, observer, arguments.scratch, arguments.in_process, arguments.accept_loss
        )
        yield scoring, connect_workers


if __name__ == "__main__":
    sys.exit(main())
