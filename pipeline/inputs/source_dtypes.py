"""The dtypes of a source's tensors. A compressed checkpoint records them, so that an export can restore them.

A tensor that is stored under its own name, or rounded, keeps its dtype in the checkpoint. `source_dtypes` in
config.json lists the dtypes of all other tensors, unless they equal the config's `dtype`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from pipeline.rounding.schemes import SCALE, WEIGHT
from stores.headers import TensorRecord

FIELD = "source_dtypes"  # of config.json


def unstored_dtypes(
    claimed: Iterable[str], source: Mapping[str, TensorRecord], stored: Collection[str], dtype: str
) -> dict[str, str]:
    """Return claimed tensor -> its dtype in the source, if that is not `dtype` and no tensor in `stored` has it."""
    unstored = (name for name in sorted(source.keys() & {*claimed}) if not _holder(name, stored))
    dtypes = {name: str(source[name].torch_dtype).removeprefix("torch.") for name in unstored}
    return {name: own for name, own in dtypes.items() if own != dtype}


def source_dtype(name: str, tensors: Mapping[str, TensorRecord], config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the source's tensor `name`, from the tensors and the config of the compressed checkpoint."""
    if holder := _holder(name, tensors):
        return tensors[holder].torch_dtype
    dtype = getattr(torch, (config.get(FIELD) or {}).get(name, config["dtype"]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _holder(name: str, stored: Collection[str]) -> str | None:
    """Return the stored tensor that has the dtype of the source's tensor `name`."""
    scale = name.removesuffix(WEIGHT) + SCALE
    return next((each for each in (name, scale) if each in stored), None)
