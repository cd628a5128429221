"""The seconds of `evaluation.tasks` in the plan: the tokens of all questions, as the job would run them."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from manifests.errors import InputError
from manifests.evaluation import Evaluation
from pipeline.cost_model.prices import WORKERS_SECONDS
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import scoring_flops
from pipeline.evaluation.streamed_tasks import count_tokens
from pipeline.evaluation.task_scores import asked_by
from pipeline.inputs.job_inputs import Inputs
from pipeline.inputs.task_names import TASKS_FIELD


def tasks_seconds(inputs: Inputs | None, evaluation: Evaluation, rates: Rates, workers: int) -> tuple[float, list[str]]:
    """Return the seconds to score both models on tasks, and a remark if they are not known."""
    if not evaluation.tasks:
        return 0.0, []
    if inputs is None or evaluation.whole_model:
        why = "with --config no tokenizer is read" if inputs is None else "each model is loaded whole"
        return 0.0, [f"{TASKS_FIELD} is not among the seconds: {why}"]
    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints
            trusted = inputs.manifest.model.trust_remote_code
            passes = count_tokens(
                inputs.source, inputs.config, asked_by(evaluation), trusted, inputs.manifest.workers.experts
            )
    except InputError as error:
        return 0.0, [f"{TASKS_FIELD} is not among the seconds: {error}"]
    geometry = inputs.geometry
    head = 2.0 * geometry.hidden * geometry.vocab
    flops = sum(
        counted.tokens * (scoring_flops(geometry, counted.window) - head) + counted.places * head for counted in passes
    )
    return 2 * (len(passes) * WORKERS_SECONDS + flops / rates.single / workers), []
