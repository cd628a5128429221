"""What decides the output's bytes: a run directory with another fingerprint belongs to another job.

docs/formats.md#run_dir.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manifests import VERSION
from pipeline.job.calibration import tokens_digest
from pipeline.job.inputs import Inputs


def job_fingerprint(inputs: Inputs, tokens: torch.Tensor | None, source_files: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value; fields are compared one by one, so that what differs can be named."""
    return {
        "source": {file: {"size": found["size"], "sha256": found["sha256"]} for file, found in source_files.items()},
        "config": inputs.source.config,
        "calibration_tokens": tokens_digest(tokens),
        "manifest": inputs.manifest.semantic(),
        "code": VERSION,
        "dtype": inputs.dtype_name,
        "device": "cuda" if inputs.manifest.workers.gpus else "cpu",
    }
