"""Writes models under other names of tensors, all of which transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
IN_MEMORY, NO_PREFIX, NEITHER, HEAD = "in memory", "no prefix", "in memory, no prefix", "head alone"
INSIDE = "model.language_model"  # where multimodal models have the decoders of Qwen3.5, and transformers removes it


def in_files(folder: Path) -> Tensors:
    """Read all tensors of a checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def in_memory(model: Any, _: Mapping[str, Tensor]) -> Tensors:
    """Return the model's parameters, tied ones once, under the names of its modules."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


def without_prefix(model: Any, tensors: Mapping[str, Tensor]) -> Tensors:
    """Remove the path of the base model, as `save_pretrained` of the base model does."""
    prefix = type(model).base_model_prefix
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}


def head_alone(model: Any, tensors: Mapping[str, Tensor]) -> Tensors:
    """Store the one matrix of tied embeddings under the head's name."""
    tied = [name for name in tensors if name in model.all_tied_weights_keys.values()]
    (head,) = model.all_tied_weights_keys
    return {head if name in tied else name: tensor for name, tensor in tensors.items()}


def inside(_: Any, tensors: Mapping[str, Tensor]) -> Tensors:
    """Move the decoder to its place in a multimodal model."""
    return {name.replace("model.", f"{INSIDE}.", 1): tensor for name, tensor in tensors.items()}


RENAMED: Mapping[str, Callable[[Any, Tensors], Tensors]] = {  # of a model and the tensors of its files
    IN_MEMORY: in_memory,
    NO_PREFIX: without_prefix,
    NEITHER: lambda model, tensors: without_prefix(model, in_memory(model, tensors)),
    HEAD: head_alone,
    INSIDE: inside,
}


def with_tensors(source: Path, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Copy a model with other tensors, in one file."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(apart, folder / "model.safetensors", {"format": "pt"})
    return folder


def rename(source: Path, folder: Path, naming: str, model: Any) -> Path:
    """Copy a saved model with the tensors of its files under the names of a key of `RENAMED`."""
    return with_tensors(source, folder, RENAMED[naming](model, in_files(source)))
