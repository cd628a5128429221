"""Writes the model of a pair: with its tokenizer, names of tensors, skewed routers and further fields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.encoders import encode_model
from tests.factories import make_tokenizer, randomise_
from tests.renamed_models import rename
from tools.soak.pair_models import BOS, EOS, FILES, TOKENIZER_SIZE, ModelSpec

TOKENIZERS: Mapping[str, str] = {  # kind -> template of a text
    "bos": "<s> $A",
    "none": "$A",
    "two": "<s> </s> $A",
    "end": "$A </s>",
    "both": "<s> $A </s>",
}
UNKNOWN_FIELD = "inputs_turned_by"  # of a `quantization_config`
ROUTERS = (".gate.weight", ".router.weight", ".gate.wg.weight")
STRONG, WEAK = 8.0, 0.02  # factors of a router's rows


def write_model(spec: ModelSpec, directory: Path, plain: Path) -> None:
    """Write the checkpoint with a tokenizer to `directory`, and under the names of `save_pretrained` to `plain`."""
    model, dtype = spec.build(), getattr(torch, spec.dtype)
    model.to(dtype)
    randomise_(model, spec.seed)
    if spec.skewed:
        skew_(model, spec.chosen_experts)
    for parameter in model.parameters():
        if not (spec.float_vectors and parameter.ndim == 1):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(plain, max_shard_size=spec.shard_size)
    make_pair_tokenizer(spec.tokenizer).save_pretrained(plain)
    if spec.encoded:
        encode_model(plain, plain.parent, spec.encoded)[0].rename(directory)
        _edit_config(directory, lambda config: config["quantization_config"].update({UNKNOWN_FIELD: "hadamard"}))
    elif spec.naming == FILES:
        shutil.copytree(plain, directory)
    else:
        rename(plain, directory, spec.naming, model)
    _edit_config(directory, lambda config: config.update(spec.fields))


def _edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def make_pair_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a kind of TOKENIZERS."""
    backend = Tokenizer.from_str(make_tokenizer(TOKENIZER_SIZE).backend_tokenizer.to_str())
    named = [(token, number) for token, number in (("<s>", BOS), ("</s>", EOS)) if token in TOKENIZERS[kind]]
    backend.post_processor = processors.TemplateProcessing(single=TOKENIZERS[kind], special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def skew_(model: Any, chosen: int) -> None:
    """Let pairs of opposite rows of each router take almost all tokens, and leave the other experts almost none."""
    for name, parameter in model.named_parameters():
        if name.endswith(ROUTERS) and parameter.ndim == 2 and parameter.shape[0] > 1:
            parameter.data = _skewed(parameter.data, chosen)


def _skewed(router_ED: Tensor, chosen: int) -> Tensor:
    """Return a router of which each token chooses one of two opposite rows, `chosen` times."""
    weak_ED, pairs = router_ED * WEAK, min(chosen, (len(router_ED) - 1) // 2)
    strong_PD = router_ED[:pairs] * STRONG
    return torch.cat([strong_PD, -strong_PD, weak_ED[2 * pairs :]])
