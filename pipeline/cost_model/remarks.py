"""Remarks on a job before it runs: too few tokens, a single source of text, storage formats that an engine refuses."""

from __future__ import annotations

import math

from manifests.quantize import CORRECTED_TOKENS
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.methods.experts.scores import FEW_TOKENS
from pipeline.methods.work import moment_width

ONE_TEXT_KEEP = 0.7  # share of the experts' numbers below which one calibration text is too little


def text_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Return the remarks on the calibration text."""
    return rank_remarks(job) + expert_remarks(job) + correction_remarks(job) + source_remarks(job)


def correction_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Report that `quantize.correct` has few tokens for the widest matrix that it fits."""
    quantize = job.manifest.quantize
    if quantize is None or quantize.correct == "none":
        return ()
    layers = job.geometry.layers
    width = max((layers[task.layer].features(pair.point) for task in job.tasks for pair in task.corrections), default=0)
    if job.tokens >= CORRECTED_TOKENS * width:
        return ()
    return (
        f"quantize.correct: {job.tokens:,} calibration tokens are {job.tokens / width:.1f} for each of the {width:,} "
        f"numbers that a matrix reads; with fewer than {CORRECTED_TOKENS}, corrections were not measured, and may fit "
        "the noise of the text: give more samples, or leave out correct",
    )


def expert_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Report the tokens of an expert with even routing, and how many samples would be enough."""
    experts = [block for layer in job.geometry.layers for block in layer.mlps if block.share < 1.0]
    calibration = job.manifest.calibration
    if not experts or calibration is None:
        return ()
    rarest = min(experts, key=lambda block: block.share / block.width)
    tokens = round(job.tokens * rarest.share)
    needed = math.ceil(FEW_TOKENS * rarest.width / rarest.share / calibration.sequence_length)
    enough = needed <= calibration.samples
    return (
        f"calibration: an expert of {rarest.width} channels sees {tokens:,} tokens if routing is even, "
        f"{tokens / rarest.width:.1f} per channel"
        + (
            "" if enough else f"; {needed:,} samples of {calibration.sequence_length} would give {FEW_TOKENS} a channel"
        ),
    )


def source_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if experts are cut to a share below `ONE_TEXT_KEEP` with the statistics of a single file or dataset."""
    manifest = job.manifest
    cut = {task.method for layer, own in job.claimed for task in own.tasks if layer.routed_roles & {*task.roles}}
    own = [entry.keep for position, entry in enumerate(manifest.methods) if position in cut]
    common = manifest.budget.share if manifest.budget else 1.0
    keep = min((common if share is None else share for share in own), default=1.0)
    texts = manifest.calibration.texts if manifest.calibration else ()
    sources = {name for text, _ in texts for name in text.sources}
    if len(sources) != 1 or keep >= ONE_TEXT_KEEP:
        return ()
    return (
        f"calibration.text: a single source decides which experts are kept at a budget of {keep:g}: all tokens of "
        f"every expert are of {sources.pop()}; experts that other text needs may be removed (published: REAP "
        "calibrated only on C4 collapses on code): give more files, or a list of texts with shares",
    )


def stored_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if matrices stay in a storage format of the source beside rounded ones, which vLLM does not load."""
    claimed = {(task.layer, role) for task in job.tasks for role in task.roles}
    kept = {
        role
        for layer in job.geometry.layers
        for role in (key.rpartition(".")[0] for key, _, keeps in layer.own_bytes if keeps)
        if (layer.index, role) not in claimed
    }
    if job.manifest.quantize is None or not kept:
        return ()
    return (
        f"quantize: {', '.join(sorted(kept))} stay in the source's storage format beside rounded matrices; "
        "transformers loads that, vLLM does not: for vLLM leave out quantize.skip, so that all are rounded",
    )


def rank_remarks(job: PlannedJob) -> tuple[str, ...]:
    """Warn if a moment has more columns than the calibration text has tokens."""
    calibration = job.manifest.calibration
    if calibration is None:
        return ()
    widths = (
        (moment_width(moment, layer), moment.point)
        for layer, own in job.claimed
        for moment in own.moments
        if moment.kind in ("value", "pair") and not moment.diagonal
    )
    width, point = max(widths, default=(0, ""))
    if job.tokens >= width:
        return ()
    return (
        f"calibration: {calibration.samples} samples of {job.sequence} are {job.tokens} tokens, fewer than the "
        f"{width} columns of {point}: its statistics are rank-deficient, and directions outside of them are lost; "
        "raise calibration.samples or calibration.sequence_length",
    )
