"""The fingerprint of a job: all inputs that determine the output's bytes. A run directory with another fingerprint is
refused.

docs/formats.md#run_dir.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manifests import VERSION
from manifests.calibration import FORMER_LEAST_TOKENS
from manifests.methods import FORMER_RIDGES
from manifests.records import SourceFile
from pipeline.inputs.calibration import tokens_digest
from pipeline.inputs.job_inputs import Inputs


def job_fingerprint(
    inputs: Inputs, tokens: torch.Tensor | None, source_files: Mapping[str, SourceFile]
) -> dict[str, Any]:
    """Return field -> value. Fields are compared one by one, so that an error can name the different ones.

    With experts and calibration, one says how the moments of experts with few tokens are completed; with
    `quantize.shrinkage`, one says which moments are shrunk. A directory without it has data by another rule.
    """
    mixture = tokens is not None and any(layer.num_experts for layer in inputs.geometry.layers)
    rules = {"experts_with_few_tokens": "completed by tokens of other experts"} if mixture else {}
    if (quantize := inputs.manifest.quantize) and quantize.shrinkage:
        rules["shrunk_moments"] = "what matrices read from the residual stream"
    return {
        "source": {file: {"size": record.size, "sha256": record.sha256} for file, record in source_files.items()},
        "config": inputs.source.config,
        "calibration_tokens": tokens_digest(tokens),
        "manifest": semantic_fields(inputs),
        "code": VERSION,
        "dtype": inputs.dtype_name,
        "device": "cuda" if inputs.manifest.workers.gpus else "cpu",
        **rules,
    }


def semantic_fields(inputs: Inputs) -> dict[str, Any]:
    """Return the manifest's fields that determine bytes, with the multiple of ranks for this model.

    `gradient.least_tokens` and the `correct_ridges` of methods have their former values where they do not matter, so
    that directories begun before they were fields go on.
    """
    manifest, fields = inputs.manifest, inputs.manifest.semantic()
    if (calibration := manifest.calibration) and (calibration.gradient.samples or not inputs.passes.gradient_samples):
        fields["calibration"]["gradient"]["least_tokens"] = FORMER_LEAST_TOKENS
    for entry, field in zip(manifest.methods, fields["methods"], strict=True):
        stepped = entry.in_steps_of(manifest.rank_multiple)
        field["rank_multiple"] = stepped.deciding_multiple(inputs.geometry.hidden)
        if field.get("correct") == "none":
            field["correct_ridges"] = FORMER_RIDGES
    return fields
