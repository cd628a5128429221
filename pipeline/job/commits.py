"""The number of layers between two commits of hidden states. docs/plan.md#commits."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from manifests.entries import ScheduleEntry
from pipeline.cost_model.commits import layers_per_commit
from pipeline.cost_model.prices import prices_of
from pipeline.cost_model.probe import ProbedShape, measured_rates
from pipeline.cost_model.rates import GPUS, Rates
from pipeline.driver.ledger_keys import SCHEDULE
from pipeline.job.context import JobContext


def commit_interval(job: JobContext, hardware: Mapping[str, str]) -> int:
    """Return `resume.every`, or for `auto` the number that the plan chose when the run directory was new.

    `hardware`: the workers' hardware (`workers.hardware`); the plan uses its rates.
    """
    every = job.manifest.resume.every
    if every != "auto":
        return every
    if job.manifest.calibration is None:  # without text there are no hidden states
        return 1
    entered = job.ledger.get(SCHEDULE)
    if entered is None:
        rates = _rates(job, hardware["device"])
        prices = prices_of(job.inputs.planned, rates, job.plan.kept)
        entered = ScheduleEntry(every=layers_per_commit(prices))
        job.ledger.commit(SCHEDULE, entered)
    job.observer.say(f"resume.every: auto: hidden states are committed every {entered.every} layers")
    return entered.every


def _rates(job: JobContext, device: str) -> Rates:
    """Return the known rates of the workers' GPU, or the measured rates of this machine's CPU."""
    workers = job.manifest.workers
    if not workers.gpus:
        shape = ProbedShape.of(job.inputs.geometry, job.manifest)
        return measured_rates(torch.device("cpu"), job.inputs.dtype, workers.cpus, workers.max, shape)
    if device in GPUS:
        return GPUS[device]
    fastest = max(GPUS, key=lambda name: GPUS[name].products)
    job.observer.say(
        f"resume.every: auto: no rates of {device} are known; those of {fastest} are used", logging.WARNING
    )
    return GPUS[fastest]
