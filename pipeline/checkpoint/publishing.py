"""Upload a checkpoint to the hub, with metadata in its card: base model, methods, size, scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from manifests.errors import CorruptError, InputError
from manifests.schema import Manifest
from pipeline.checkpoint.compression_record import (
    RECORD_FILE,
    SEAL,
    describe_bytes,
    encode_json,
    quick_faults,
    read_record,
    sealed,
)
from pipeline.checkpoint.listing import CARD_FILE
from pipeline.driver.ledger_keys import COMPLETE
from pipeline.evaluation.task_scores import read_scores, shown_settings
from stores.hub_upload import upload_model
from stores.run_directory import run_of_job
from stores.source import INDEX_FILE, is_hub_id
from stores.storage import Place, open_storage


def publish(
    output: Place,
    repository: str,
    *,
    revision: str | None,
    private: bool,
    run_dir: Place | None,
    base_model: str | None,
    say: Callable[[str], None],
) -> str:
    """Upload the checkpoint in `output` and return the address of the commit.

    The files are uploaded unchanged, except the card and its digest in the compression record.

    Raises:
        InputError: `output` is not a checkpoint, `run_dir` is of another one, or the hub refuses.
        CorruptError: the checkpoint is damaged.
    """
    compression = read_record(output)
    if faults := quick_faults(output, compression[SEAL]):
        raise CorruptError("\n".join(faults))
    storage = open_storage(output)
    small = {name: storage.read(name) for name in (*compression["files"], INDEX_FILE)}
    evaluation, text = ({}, "") if run_dir is None else _scores(run_dir, compression[SEAL])
    source = compression["source"]["path"]
    origin = base_model or (source if is_hub_id(source) else None)
    metadata = card_metadata(compression, repository, origin, evaluation, text)
    card = with_metadata(small[CARD_FILE].decode(), metadata).encode()
    record = sealed({**compression, "files": {**compression["files"], CARD_FILE: describe_bytes(card)}})
    small |= {CARD_FILE: card, RECORD_FILE: encode_json(record)}
    weights = {name: record["sha256"] for name, record in compression["shards"].items()}
    return upload_model(storage, weights, small, RECORD_FILE, repository, revision, private, say)


def card_metadata(
    compression: Mapping[str, Any], repository: str, base_model: str | None, evaluation: Mapping[str, Any], text: str
) -> dict[str, Any]:
    """Return the metadata of a model card on the hub: https://huggingface.co/docs/hub/model-cards.

    `evaluation`: the scores in a finished job's summary. `text`: the name of the text that perplexity is measured on.
    """
    from huggingface_hub import EvalResult, ModelCardData

    parameters = compression["counts"]["parameters"]
    methods = [entry["method"] for entry in compression["manifest"]["methods"]]
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=metric,
            metric_name=name,
            metric_value=value,
        )
        for dataset, metric, name, value in _results(evaluation, text)
    ]
    data = ModelCardData(
        model_name=repository.rpartition("/")[2],
        base_model=base_model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lamina", "compressed", *methods],
        eval_results=results or None,
        lamina={"methods": methods, "keep": round(parameters["compressed"] / parameters["dense"], 4)},
    )
    metadata: dict[str, Any] = data.to_dict()  # type: ignore[no-untyped-call]
    return metadata


def with_metadata(card: str, metadata: Mapping[str, Any]) -> str:
    """Return the card with additional metadata and unchanged text."""
    from huggingface_hub import ModelCard

    model_card = ModelCard(card)
    for name, value in metadata.items():
        model_card.data[name] = value
    return str(model_card)


def _results(evaluation: Mapping[str, Any], text: str) -> Iterator[tuple[str, str, str, float]]:
    """Yield (data, metric, its name, value) of a summary's scores. Names of the dense model's scores contain
    `dense`."""
    for field, suffix in (("perplexity", ""), ("dense", ", dense model")):
        if evaluation.get(field):
            yield text, *_perplexity(evaluation[field], suffix)
    settings = shown_settings(evaluation.get("task_settings", {}))
    how = f" ({settings})" if settings else ""
    for model, suffix in (("compressed", ""), ("dense", ", dense model")):
        for task, scores in read_scores(evaluation.get("tasks", {}).get(model, {})).items():
            for metric, figure in scores.metrics.items():
                yield task, metric, f"{metric}{suffix}{how}", figure.value


def _perplexity(score: Mapping[str, Any], suffix: str) -> tuple[str, str, float]:
    """Return metric, its name and value: the loss if perplexity is infinite, which the hub does not accept."""
    if math.isfinite(value := float(score["perplexity"])):
        return "perplexity", f"perplexity{suffix}", value
    return "loss", f"loss in nats per token{suffix}", score["loss"]


def _scores(run_dir: Place, seal: str) -> tuple[Mapping[str, Any], str]:
    """Return the scores of the job that wrote a checkpoint, and the name of the text. Raises InputError."""
    run = run_of_job(run_dir)
    complete, manifest = run.ledger.get(COMPLETE), run.read_manifest()
    if complete is None or complete.contract_sha256 != seal:
        raise InputError(f"{run.place}: not the run directory of the job that wrote this checkpoint")
    return complete.summary["evaluation"], _text_name(manifest)


def _text_name(manifest: Manifest | None) -> str:
    """Return the name of the text that perplexity is measured on."""
    if manifest is None or manifest.evaluation.perplexity is None:
        return ""
    text = manifest.evaluation.perplexity.text
    names = ", ".join(PurePath(file).name for file in text.files or ())
    part = f", from {text.begin:g} to {text.end:g} of its length" if (text.begin, text.end) != (0.0, 1.0) else ""
    return text.dataset or names + part
