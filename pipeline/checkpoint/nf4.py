"""Write codes of normal levels as NF4 weights of bitsandbytes, which transformers and vLLM load.

The levels are those of NF4, and a group's scale is its `absmax`, perhaps negative. Unlike weights that bitsandbytes
rounds itself, absmax is not the largest magnitude of its block, codes follow error feedback, and absmax is not rounded
to 8 bits (double quantization). The table is NF4's in float32, so that a weight may differ from Lamina's by the
rounding of Lamina's stored levels. Legend: O outputs, I inputs, S scales of a row, A blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manifests.errors import InputError
from manifests.records import Scheme
from pipeline.kernels.levels import normal_levels
from pipeline.kernels.packing import unpack
from pipeline.rounding.schemes import FIELD, LEVELS, PACKED, SCALE, SHAPE, TABLES, WEIGHT

BITS = 4
BLOCKS = (32, 64, 128)  # numbers per absmax; 32 since bitsandbytes 0.50
QUANT_STATE = "quant_state.bitsandbytes__nf4"


def is_nf4(config: Mapping[str, Any]) -> bool:
    """Return True if all rounded modules of a checkpoint have normal levels of 4 bits, in groups that NF4 has."""
    tables = [Scheme(**scheme) for scheme in (config.get(TABLES) or {}).values()]
    fits = all(each.levels == "normal" and each.bits == BITS and each.group in BLOCKS for each in tables)
    return bool(tables) and fits and not config.get(FIELD)


def nf4_tensors(path: str, parts: Mapping[str, Tensor], block: int) -> dict[str, Tensor]:
    """Return the tensors that replace a module's packed ones. `block`: the group of its scheme.

    Raises InputError if its table has other levels, as earlier versions of `heal` trained them.
    """
    levels_n = parts[path + LEVELS]
    if not torch.equal(levels_n, normal_levels(BITS).to(levels_n.dtype)):
        raise InputError(
            f"{path}: its levels were trained (heal) and are not NF4's; --multiply-out stores all matrices unrounded"
        )
    shape = parts[path + SHAPE].tolist()
    numbers = unpack(parts[path + PACKED], BITS, shape[1]).flatten().to(torch.int16) + 2 ** (BITS - 1)
    scales_OS = parts[path + SCALE]
    dtype = str(scales_OS.dtype).removeprefix("torch.")
    state = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": shape}
    name = path + WEIGHT
    return {
        name: (numbers[0::2] << BITS | numbers[1::2]).to(torch.uint8)[:, None],
        f"{name}.absmax": scales_OS.flatten().to(torch.float32),
        f"{name}.quant_map": normal_levels(BITS).to(torch.float32),
        f"{name}.{QUANT_STATE}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


def nf4_config(rounded: Iterable[str], linears: Iterable[str], dtype: str) -> dict[str, Any]:
    """Return `quantization_config` of config.json. `linears`: the paths of all linear modules of the model."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": sorted({*linears} - {*rounded}),
    }
