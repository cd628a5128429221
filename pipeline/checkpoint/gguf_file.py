"""A compressed checkpoint as one GGUF file, for llama.cpp: multiplied back, MLPs at their own widths. Matrices of 8 and
4 bits that are whole, or of fewer channels, keep their codes, as Q8_0 and Q4_0.

`gguf` is an extra: `pip install 'CHECKOUT[gguf]'`. The architecture is `llama` where all MLPs are of one width,
else `deci`, whose sizes are lists by layer. Both turn neighbours (2i, 2i + 1) by rotary angles where our families turn
halves (i, i + d/2), so that the rows of q and k are reordered.

Legend: D hidden, n heads, d head_dim.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina import LayersConfig
from lamina.rotary_lamina import LaminaRotaryEmbedding
from manifests.errors import InputError
from manifests.packages import install_advice
from manifests.records import Scheme
from pipeline.checkpoint.dense_weights import dense_weights
from pipeline.checkpoint.exporting import coarsest, compressed_checkpoint, try_destination, whole_roles
from pipeline.checkpoint.gguf_blocks import BLOCK, BYTES, Kind, block_kind, blocks
from pipeline.checkpoint.targets import mlp_widths, refuse_faults
from pipeline.families.blocks import AttentionBlock
from pipeline.families.registry import geometry_of
from pipeline.inputs.source_dtypes import source_dtype
from pipeline.kernels.packing import unpack
from pipeline.rounding.schemes import PACKED, SCALE, SHAPE, packed_modules, rounded_modules
from stores.durable import partial_path, storage_errors
from stores.source import SourceCheckpoint
from stores.storage import is_address, open_storage
from workers.layers import cpu_reader

LAYER_NAMES = {
    "input_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # what the file calls them


def export_gguf(output: str, destination: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes OUTPUT to a file, a layer in memory at a time; it appears complete, or not at all. Returns what it stores.

    The vocabulary is left out (`no_vocab`): llama.cpp then takes and gives token ids.

    Raises:
        InputError: no Lamina checkpoint, no package gguf, a file that is there, no folder for it, or a model that
            llama.cpp's two architectures cannot be.
        StorageError: a file cannot be read or written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"--to gguf: the package gguf is not installed; {install_advice('gguf')}")
    checkpoint, config = compressed_checkpoint(output, destination)
    path = Path(destination)
    if is_address(destination) or not path.parent.is_dir():
        raise InputError(f"{destination}: its folder is no directory of this machine; make it, or give another file")
    if os.path.lexists(path):
        raise InputError(f"{destination}: is there already; give a file that is not")
    refuse_faults(config, "gguf")
    try_destination(open_storage(path.parent))
    partial = partial_path(path)
    try:
        with storage_errors("writing", path):
            written = _write(checkpoint, config, partial, say)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    before = sum(record.num_bytes for record in checkpoint.tensors.values())
    return {**written, "bytes": path.stat().st_size, "bytes_before": before}


def _write(
    checkpoint: SourceCheckpoint, config: Mapping[str, Any], path: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Writes the file. Returns its architecture, and how many numbers it stores."""
    import gguf

    described = LayersConfig(**config)
    widths = mlp_widths(described)
    uniform = len(set(widths)) == 1
    writer = gguf.GGUFWriter(str(path), "llama" if uniform else "deci")
    _describe_(writer, described, widths[0] if uniform else widths)
    numbers = 0
    rounded, dtypes = _rounded(checkpoint, config), _file_dtypes(checkpoint, config)
    for name, shape in _shapes(described, widths):
        if name in rounded:
            kind = gguf.GGMLQuantizationType[rounded[name].kind]
            bytes_shape: tuple[int, ...] = (shape[0], shape[1] // BLOCK * BYTES[rounded[name].kind])
        else:
            dtype = dtypes.get(name, torch.float32)
            kind, bytes_shape = (
                getattr(gguf.GGMLQuantizationType, KINDS[dtype]),
                (*shape[:-1], shape[-1] * dtype.itemsize),
            )
        writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), raw_dtype=kind)
        numbers += int(np.prod(shape))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        tensors = _tensors(checkpoint, config, described, say)
        for (name, _), tensor in zip(_shapes(described, widths), tensors, strict=True):
            if name in rounded:
                kept = rounded[name].read(checkpoint)
            else:
                kept = tensor.to(dtypes.get(name, torch.float32)).contiguous()
            writer.write_tensor_data(kept.view(torch.uint8).numpy())
    finally:
        writer.close()
    return {"parameters": numbers, "architecture": writer.arch}


@dataclass(frozen=True)
class _Rounded:
    """A matrix whose codes go into the file: its module's path and scheme, and the heads whose rows are reordered."""

    path: str
    scheme: Scheme
    kind: Kind
    heads: int | None

    def read(self, checkpoint: SourceCheckpoint) -> Tensor:
        """Its blocks (O, bytes of a row) uint8."""
        found = checkpoint.read([self.path + part for part in (PACKED, SCALE, SHAPE)])
        codes_OI = unpack(found[self.path + PACKED], self.scheme.bits, int(found[self.path + SHAPE][1]))
        scales_OS = found[self.path + SCALE]
        if self.heads is not None:
            codes_OI, scales_OS = (neighbours_first(rows, self.heads) for rows in (codes_OI, scales_OS))
        return blocks(codes_OI, scales_OS, self.kind)


def _rounded(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> dict[str, _Rounded]:
    """By its name in the file, every matrix whose codes llama.cpp's blocks hold; others are multiplied out."""
    heads: dict[str, int | None] = {config["block"][name]: None for name in ("embed", "head")}
    for layer in geometry_of(config).layers:
        rotated = _rotated(layer.attention)
        heads |= {layer.path(role): rotated.get(role) for role in whole_roles(config, layer)}
    names, found = _file_names(config), {}
    for path, scheme in rounded_modules(config, packed_modules(checkpoint.tensors)).items():
        if path not in heads:
            continue
        parts = checkpoint.read([path + SCALE, path + SHAPE])
        kind = block_kind(scheme, int(parts[path + SHAPE][1]), parts[path + SCALE])
        if kind is not None:
            found[names[path]] = _Rounded(path, scheme, kind, heads[path])
    return found


def _describe_(writer: Any, described: LayersConfig, width: int | list[int]) -> None:
    """The sizes; by layer where the widths are."""
    layers, heads, kv_heads = (
        described.num_hidden_layers,
        described.num_attention_heads,
        described.num_key_value_heads,
    )
    by_layer = isinstance(width, list)
    writer.add_context_length(described.max_position_embeddings)
    writer.add_embedding_length(described.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count([heads] * layers if by_layer else heads)
    writer.add_head_count_kv([kv_heads] * layers if by_layer else kv_heads)
    writer.add_key_length(described.head_dim)
    writer.add_value_length(described.head_dim)
    writer.add_rope_dimension_count(described.head_dim)
    writer.add_rope_freq_base(float((described.rope_parameters or {})["rope_theta"]))
    writer.add_layer_norm_rms_eps(described.norm_eps)
    writer.add_vocab_size(described.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _shapes(described: LayersConfig, widths: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, in the order of the file."""
    D, d = described.hidden_size, described.head_dim
    query, key = described.num_attention_heads * d, described.num_key_value_heads * d
    yield "token_embd.weight", (described.vocab_size, D)
    yield "output_norm.weight", (D,)
    if not described.tie_word_embeddings:
        yield "output.weight", (described.vocab_size, D)
    if _frequency_factors(described) is not None:
        yield "rope_freqs.weight", (d // 2,)
    for layer, width in enumerate(widths):
        shapes = {
            "input_norm": (D,), "q": (query, D), "k": (key, D), "v": (key, D), "o": (D, query), "mlp_norm": (D,),
            "gate": (width, D), "up": (width, D), "down": (D, width),
        }  # fmt: skip
        yield from ((f"blk.{layer}.{LAYER_NAMES[role]}.weight", shape) for role, shape in shapes.items())


def _tensors(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    described: LayersConfig,
    say: Callable[[str], None],
) -> Iterator[Tensor]:
    """What `_shapes` names."""
    geometry, block = geometry_of(config), described.block
    dtype_of = partial(source_dtype, tensors=checkpoint.tensors, config=config)
    outer = [f"{block['embed']}.weight", f"{block['final_norm']}.weight"]
    outer += [] if described.tie_word_embeddings else [f"{block['head']}.weight"]
    reader = cpu_reader(checkpoint, config, torch.float64)
    for name in outer:
        yield reader.outer(name)[name]
    if (factors := _frequency_factors(described)) is not None:
        yield factors
    for layer in range(geometry.num_layers):
        reader.read_ahead(layer + 1)
        mine = geometry.layers[layer]
        weights = dense_weights(reader.block(layer, None).module, mine, coarsest(mine, dtype_of))
        for role, heads in _rotated(mine.attention).items():
            weights[f"{role}.weight"] = neighbours_first(weights[f"{role}.weight"], heads)
        yield from (weights[f"{role}.weight"] for role in LAYER_NAMES)
        say(f"layer {layer} written")


def _rotated(block: AttentionBlock) -> dict[str, int]:
    """Map the roles whose outputs are rotated to their numbers of heads."""
    return {block.query.role: block.heads, block.key.role: block.kv_heads}


def neighbours_first(weight: Tensor, heads: int) -> Tensor:
    """Rows (n·d, D) of pairs (i, i + d/2) → pairs (2i, 2i + 1), in each head."""
    pairs_n2hD: Tensor = weight.unflatten(0, (heads, 2, -1))
    return pairs_n2hD.transpose(1, 2).flatten(0, 2).contiguous()


def _frequency_factors(described: LayersConfig) -> Tensor | None:
    """(d/2,): what the default frequencies are divided by; None where these are the model's."""
    rotary = LaminaRotaryEmbedding(described)
    default, _ = LaminaRotaryEmbedding.compute_default_rope_parameters(described)
    factors = default / rotary.inv_freq
    return None if torch.equal(factors, torch.ones_like(factors)) else factors


def _file_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Path of a matrix's module -> the matrix's name in the file."""
    names = {config["block"]["embed"]: "token_embd.weight", config["block"]["head"]: "output.weight"}
    for layer in geometry_of(config).layers:
        names |= {layer.path(role): f"blk.{layer.index}.{LAYER_NAMES[role]}.weight" for role in layer.matrices}
    return names


def _file_dtypes(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Of the matrices in the file: the source's, but float32 where that is float64. Vectors are float32."""
    dtypes = {
        name: source_dtype(f"{path}.weight", checkpoint.tensors, config) for path, name in _file_names(config).items()
    }
    return {name: dtype if dtype in KINDS else torch.float32 for name, dtype in dtypes.items()}
