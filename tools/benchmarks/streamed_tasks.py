"""Tasks of log-likelihoods: one layer at a time, beside lm-eval's own class `hf`, in turns within one process.

python -m tools.benchmarks.streamed_tasks MODEL tools/tasks/*_local.yaml --limit 12 --batches 4 8 16 --turns 2
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manifests.packages import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch

from manifests.schema import Workers
from pipeline.console.progress import JobObserver
from pipeline.evaluation.perplexity import Scoring
from pipeline.evaluation.streamed_tasks import score_streamed
from pipeline.evaluation.task_scores import AskedTasks, Scores, load_tasks, run_tasks


@dataclass
class Timed:
    """The seconds of one way of scoring, turn by turn, on the clock and of the processor, and its scores."""

    wall_s: list[float]
    cpu_s: list[float]
    scores: Scores | None = None

    def run(self, score: Callable[[], Scores]) -> None:
        """Score once more."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.scores = score()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


def main() -> None:
    """Print the seconds of both ways, and the largest difference of their figures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("tasks", nargs="+")
    options.add_argument("--limit", type=int)
    options.add_argument("--batches", type=int, nargs="+", default=[8], help="of lm-eval's class `hf`")
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--cpus", type=int, default=1)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.cpus)
    asked = AskedTasks(tuple(arguments.tasks), "TASK", arguments.limit)
    whole = _whole_model(arguments.model)
    ways = {f"hf, batch {batch}": Timed([], []) for batch in arguments.batches} | {"streamed": Timed([], [])}
    for _ in range(arguments.turns):
        for batch in arguments.batches:
            ways[f"hf, batch {batch}"].run(lambda: _by_hf(whole, arguments.model, asked, batch))  # noqa: B023
        ways["streamed"].run(lambda: _streamed(arguments.model, asked, arguments.cpus))
    for name, timed in ways.items():
        least = min(timed.cpu_s)
        print(f"{name}: processor {_listed(timed.cpu_s)} s, least {least:.1f}; clock {_listed(timed.wall_s)} s")
    ours, *others = reversed(ways.values())
    print(f"largest difference of a figure: {max(_difference(ours.scores, other.scores) for other in others):.2g}")


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in seconds)


def _whole_model(model: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lamina  # noqa: F401 - registers its classes

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval(), AutoTokenizer.from_pretrained(model)


def _by_hf(whole: tuple[Any, Any], model: str, asked: AskedTasks, batch: int) -> Scores:
    from lm_eval.models.huggingface import HFLM

    loaded, tokenizer = whole
    lm = HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=batch)
    return run_tasks(lm, model, asked, load_tasks(asked, generates=False))


def _streamed(model: str, asked: AskedTasks, cpus: int) -> Scores:
    with JobObserver(quiet=True) as observer:
        scoring = Scoring(Workers(max=1, cpus=cpus), torch.float32, threading.Event(), observer, in_process=True)
        return score_streamed(model, asked, scoring)


def _difference(ours: Scores | None, theirs: Scores | None) -> float:
    assert ours is not None
    assert theirs is not None
    pairs = [(each.metrics, theirs[task].metrics) for task, each in ours.items()]
    return max(abs(one[name].value - other[name].value) for one, other in pairs for name in one)


if __name__ == "__main__":
    main()
