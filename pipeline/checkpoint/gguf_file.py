"""Export a compressed checkpoint as one GGUF file for llama.cpp. Factors are multiplied out; MLPs keep their widths.

Matrices of 8 and 4 bits that are not factored keep their codes, as Q8_0 and Q4_0, or as IQ4_NL with its levels
(`gguf_codes`). Mixtures of experts are in `gguf_mixtures`. The architecture of dense models is `llama` if all MLPs have
one width, else `deci`, whose sizes are lists by layer. Both rotate neighbours (2i, 2i + 1), and our families rotate
halves (i, i + d/2). Therefore the rows of q and k, and their biases, are reordered.
The package gguf is an extra: `pip install 'CHECKOUT[gguf]'`.

Legend: D hidden, n heads, d head_dim.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina import LayersConfig
from lamina.rotary_lamina import LaminaRotaryEmbedding
from manifests.engines import GGUF_BLOCK
from manifests.errors import InputError
from manifests.packages import install_advice
from pipeline.checkpoint.dense_weights import dense_weights
from pipeline.checkpoint.exporting import coarsest, compressed_checkpoint, try_destination
from pipeline.checkpoint.gguf_blocks import BYTES, Kind, eight_bits
from pipeline.checkpoint.gguf_codes import Coded, coded_matrices, unchanged
from pipeline.checkpoint.gguf_mixtures import MixtureFile, neighbours_first
from pipeline.checkpoint.gguf_names import BIASES, LAYER_NAMES
from pipeline.checkpoint.gguf_vocabulary import add_vocabulary, vocabulary_of
from pipeline.checkpoint.targets import ARCHITECTURES, is_mixture, mlp_widths, refuse_faults
from pipeline.families.blocks import AttentionBlock, roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.source_dtypes import source_dtype
from stores.corpus import load_tokenizer
from stores.durable import partial_path, storage_errors
from stores.model_files import TOKENIZERS
from stores.source import SourceCheckpoint
from stores.storage import is_address, matching, open_storage
from workers.checkpoint_reader import cpu_reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDS = ("token_embd.weight", "output.weight")  # token embeddings, and the head unless it is tied to them
DTYPE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # GGUF's names


def export_gguf(
    output: str,
    destination: str,
    say: Callable[[str], None],
    multiply_out: bool = False,
    with_vocabulary: bool = True,
    in_float32: bool = False,
    rounds_ends: bool = False,
) -> dict[str, Any]:
    """Write OUTPUT to a file, a layer at a time. The file appears complete or not at all. Return its sizes.

    `multiply_out`: as in `export_checkpoint`. Without a vocabulary (`no_vocab`), llama.cpp reads and prints token ids.
    `in_float32`: store matrices without codes in float32 in place of the source's dtype, to which products of factors
    would be rounded. `rounds_ends`: store token embeddings and the head as Q8_0, unless they have codes.

    Raises:
        InputError: OUTPUT is not a Lamina checkpoint, the package gguf is missing, the file exists or its folder does
            not, or llama.cpp's architectures and vocabularies cannot express the model and its tokenizer.
        StorageError: a file cannot be read or written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"--to gguf: the package gguf is not installed; {install_advice('gguf')}")
    checkpoint, config = compressed_checkpoint(output, destination)
    path = Path(destination)
    if is_address(destination) or not path.parent.is_dir():
        raise InputError(f"{destination}: its folder is not a directory of this machine; make it, or give another file")
    if os.path.lexists(path):
        raise InputError(f"{destination}: exists already; give a new file")
    refuse_faults(config, "gguf", multiply_out)
    try_destination(open_storage(path.parent))
    describe = partial(_add_description, output, checkpoint, config, _tokenizer(checkpoint, with_vocabulary, say))
    unfinished = partial_path(path)
    try:
        with storage_errors("writing", path):
            written = _write(checkpoint, config, unfinished, describe, say, in_float32, rounds_ends)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    before = sum(record.num_bytes for record in checkpoint.tensors.values())
    return {**written, "bytes": path.stat().st_size, "bytes_before": before}


def _tokenizer(
    checkpoint: SourceCheckpoint, with_vocabulary: bool, say: Callable[[str], None]
) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer, or None if it has none or `with_vocabulary` is off. Raises InputError if
    llama.cpp has no such vocabulary."""
    if not with_vocabulary:
        return None
    if not matching(checkpoint.storage, TOKENIZERS):
        say(f"{checkpoint.place}: has no tokenizer; llama.cpp will read and print token ids")
        return None
    tokenizer = load_tokenizer(checkpoint.storage)
    vocabulary = vocabulary_of(tokenizer, checkpoint.config["vocab_size"])
    if vocabulary.composed:
        say(
            "tokenizer: composes letters and their marks (NFC), which llama.cpp does not; most text is composed already"
        )
    if vocabulary.single_spaces:
        say("tokenizer: merges several spaces into one, which llama.cpp does not; give it text with single spaces")
    return tokenizer


def _add_description(
    output: str,
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    writer: Any,
    kinds: Sequence[str],
) -> None:
    """Write the model's name, the kind of most of its matrices, and its vocabulary."""
    import gguf

    writer.add_name(PurePath(output).name)
    kind = max(kinds, key=kinds.count)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    if {*kinds} - {*DTYPE_KINDS.values()}:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, tokenizer, config["vocab_size"])


def _write(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    path: Path,
    describe: Callable[[Any, Sequence[str]], None],
    say: Callable[[str], None],
    in_float32: bool = False,
    rounds_ends: bool = False,
) -> dict[str, Any]:
    """Write the file. `describe`: adds all other fields than sizes, given the writer and the kinds of matrices.

    Return its architecture and the count of its numbers.
    """
    import gguf

    numbers, kinds = 0, []
    shapes, dtypes, coded, writer, tensors = _contents(checkpoint, config, path, say)
    dtypes = {} if in_float32 else dtypes
    of_blocks: dict[str, Kind] = {name: tensor.kind for name, tensor in coded.items()}
    for name, shape in shapes if rounds_ends else ():
        if name in ENDS and name not in coded and shape[-1] % GGUF_BLOCK:
            say(f"{name}: rows of {shape[-1]} numbers are no whole blocks of {GGUF_BLOCK}; stored unrounded")
        elif name in ENDS and name not in coded:
            of_blocks[name] = "Q8_0"
    for name, shape in shapes:
        if name in of_blocks:
            kind: str = of_blocks[name]
            row_bytes = shape[-1] // GGUF_BLOCK * BYTES[of_blocks[name]]
        else:
            dtype = dtypes.get(name, torch.float32)
            kind, row_bytes = DTYPE_KINDS[dtype], shape[-1] * dtype.itemsize
        kinds += [kind] if len(shape) > 1 else []
        bytes_shape, raw_dtype = (*shape[:-1], row_bytes), gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), math.prod(bytes_shape), raw_dtype=raw_dtype)
        numbers += math.prod(shape)
    describe(writer, kinds)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (name, _), tensor in zip(shapes, tensors, strict=True):
            if name in coded:
                tensor = coded[name].read(checkpoint)
            elif name in of_blocks:
                tensor = eight_bits(tensor)
            else:
                tensor = tensor.to(dtypes.get(name, torch.float32)).contiguous()
            writer.write_tensor_data(tensor.view(torch.uint8).numpy())
    finally:
        writer.close()
    return {"parameters": numbers, "architecture": writer.arch}


_Shapes = list[tuple[str, tuple[int, ...]]]


def _contents(
    checkpoint: SourceCheckpoint, config: Mapping[str, Any], path: Path, say: Callable[[str], None]
) -> tuple[_Shapes, Mapping[str, torch.dtype], Mapping[str, Coded], Any, Iterator[Tensor]]:
    """Return the tensors' names, shapes and dtypes; those whose codes are kept; the writer; and the tensors."""
    import gguf

    if is_mixture(config):
        file = MixtureFile(checkpoint, config, ARCHITECTURES[config["source_model_type"]])
        writer = gguf.GGUFWriter(str(path), file.architecture)
        file.add_sizes(writer)
        each = [*file.all]
        shapes = [(tensor.name, tensor.shape) for tensor in each]
        return shapes, {tensor.name: tensor.dtype for tensor in each}, file.coded, writer, file.tensors(say)
    described = LayersConfig(**config)
    widths = mlp_widths(described)
    uniform = len(set(widths)) == 1
    writer = gguf.GGUFWriter(str(path), "llama" if uniform else "deci")
    _add_sizes(writer, described, widths[0] if uniform else widths)
    coded, tensors = _coded_tensors(checkpoint, config), _tensors(checkpoint, config, described, say)
    return [*_shapes(config, described, widths)], _file_dtypes(checkpoint, config), coded, writer, tensors


def _coded_tensors(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> dict[str, Coded]:
    """Map names in the file to matrices whose codes it keeps. Others are dequantized."""
    names, arranged = _file_names(config), dict[str, Callable[[Tensor], Tensor]]()
    for layer in geometry_of(config).layers:
        for role, heads in _rotated(layer.attention).items():
            arranged[layer.path(role)] = partial(neighbours_first, heads=heads)
    coded = coded_matrices(checkpoint, config)
    return {names[path]: replace(matrix, arranged=arranged.get(path, unchanged)) for path, matrix in coded.items()}


def _add_sizes(writer: Any, described: LayersConfig, width: int | list[int]) -> None:
    """Write the model's sizes. Heads are lists by layer if the widths are."""
    repeated = described.num_hidden_layers if isinstance(width, list) else None
    heads, kv_heads = described.num_attention_heads, described.num_key_value_heads
    writer.add_context_length(described.max_position_embeddings)
    writer.add_embedding_length(described.hidden_size)
    writer.add_block_count(described.num_hidden_layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count([heads] * repeated if repeated else heads)
    writer.add_head_count_kv([kv_heads] * repeated if repeated else kv_heads)
    writer.add_key_length(described.head_dim)
    writer.add_value_length(described.head_dim)
    writer.add_rope_dimension_count(described.head_dim)
    writer.add_rope_freq_base(float((described.rope_parameters or {})["rope_theta"]))
    writer.add_layer_norm_rms_eps(described.norm_eps)
    writer.add_vocab_size(described.vocab_size)


def _shapes(
    config: Mapping[str, Any], described: LayersConfig, widths: list[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor, in the order of the file."""
    D, d = described.hidden_size, described.head_dim
    yield "token_embd.weight", (described.vocab_size, D)
    yield "output_norm.weight", (D,)
    if not described.tie_word_embeddings:
        yield "output.weight", (described.vocab_size, D)
    if _frequency_factors(described) is not None:
        yield "rope_freqs.weight", (d // 2,)
    for layer, width in zip(geometry_of(config).layers, widths, strict=True):
        (mlp,) = layer.mlps
        shapes: dict[str, tuple[int, ...]] = {norm.role: (norm.size,) for norm in layer.norms}
        shapes |= {matrix.role: matrix.shape for matrix in layer.attention.matrices}
        shapes |= {**dict.fromkeys(roles_of(mlp.readers), (width, D)), mlp.writer.role: (D, width)}
        yield from ((f"blk.{layer.index}.{name}.weight", shapes[role]) for role, name in LAYER_NAMES.items())
        yield from ((f"blk.{layer.index}.{LAYER_NAMES[role]}.bias", shapes[role][:1]) for role in _biased(layer))


def _tensors(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    described: LayersConfig,
    say: Callable[[str], None],
) -> Iterator[Tensor]:
    """Yield the tensors in the order of `_shapes`."""
    block = described.block
    dtype_of = partial(source_dtype, tensors=checkpoint.tensors, config=config)
    outer = [f"{block['embed']}.weight", f"{block['final_norm']}.weight"]
    outer += [] if described.tie_word_embeddings else [f"{block['head']}.weight"]
    reader = cpu_reader(checkpoint, config, torch.float64)
    for name in outer:
        yield reader.outer(name)[name]
    if (factors := _frequency_factors(described)) is not None:
        yield factors
    for layer in geometry_of(config).layers:
        reader.read_ahead(layer.index + 1)
        weights = dense_weights(reader.block(layer.index, None).module, layer, coarsest(layer, dtype_of))
        for role, heads in _rotated(layer.attention).items():
            for key in (key for key in (f"{role}.weight", f"{role}.bias") if key in weights):
                weights[key] = neighbours_first(weights[key], heads)
        yield from (weights[f"{role}.weight"] for role in LAYER_NAMES)
        yield from (weights[f"{role}.bias"] for role in _biased(layer))
        say(f"layer {layer.index} written")


def _biased(layer: LayerGeometry) -> list[str]:
    """Return the roles with a bias, in the order of the file."""
    return [role for role in BIASES if layer.matrices[role].bias]


def _rotated(block: AttentionBlock) -> dict[str, int]:
    """Map the roles whose outputs are rotated to their numbers of heads."""
    return {block.query.role: block.heads, block.key.role: block.kv_heads}


def _frequency_factors(described: LayersConfig) -> Tensor | None:
    """Return the default frequencies over the model's (d/2,), or None if they are equal."""
    rotary = LaminaRotaryEmbedding(described)
    default, _ = LaminaRotaryEmbedding.compute_default_rope_parameters(described)
    factors = default / rotary.inv_freq
    return None if torch.equal(factors, torch.ones_like(factors)) else factors


def _file_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Map module paths to names of matrices in the file."""
    names = {config["block"]["embed"]: "token_embd.weight", config["block"]["head"]: "output.weight"}
    for layer in geometry_of(config).layers:
        names |= {layer.path(role): f"blk.{layer.index}.{LAYER_NAMES[role]}.weight" for role in layer.matrices}
    return names


def _file_dtypes(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Map names in the file to the dtypes of matrices: the source's, but float32 for float64. Vectors are float32."""
    dtypes = {
        name: source_dtype(f"{path}.weight", checkpoint.tensors, config) for path, name in _file_names(config).items()
    }
    return {name: dtype if dtype in DTYPE_KINDS else torch.float32 for name, dtype in dtypes.items()}
