"""The dtypes that the tensors of a source have, as far as a compressed checkpoint's config.json has to say them.

A tensor that is stored under its own name, or rounded, has its dtype there; `source_dtypes` names the others that
differ from the config's `dtype`. An export gives each tensor the source's dtype.
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
    """Claimed tensor -> its dtype in the source, where no stored tensor has it and it is not `dtype`."""
    unstored = (name for name in sorted(source.keys() & {*claimed}) if not _holder(name, stored))
    dtypes = {name: str(source[name].torch_dtype).removeprefix("torch.") for name in unstored}
    return {name: own for name, own in dtypes.items() if own != dtype}


def source_dtype(name: str, tensors: Mapping[str, TensorRecord], config: Mapping[str, Any]) -> torch.dtype:
    """Of the source's tensor `name`, by the tensors and the config of the compressed checkpoint."""
    if holder := _holder(name, tensors):
        return tensors[holder].torch_dtype
    found = getattr(torch, (config.get(FIELD) or {}).get(name, config["dtype"]))
    assert isinstance(found, torch.dtype)
    return found


def _holder(name: str, stored: Collection[str]) -> str | None:
    """The stored tensor that has the dtype of the source's tensor `name`."""
    scale = name.removesuffix(WEIGHT) + SCALE
    return next((each for each in (name, scale) if each in stored), None)
