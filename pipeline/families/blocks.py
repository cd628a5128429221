"""The blocks of a decoder layer as data: their matrices, and the point that each reads and feeds.

A *point* names values in a layer: `attention.in`, `o.in`, `mlp.in` and `down.in` are inputs of matrices; `mid` and
`out` are the residual stream after attention and after the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from lamina.block_lamina import SINKS, LayerShape
from lamina.mixture_lamina import (
    INPUTS,
    ROUTER,
    ROUTER_BIAS,
    SHARED,
    SHARED_GATE,
    expert_blocks,
    has_biases,
    mixture_of,
)

STREAM_POINTS = ("mid", "out")
ROUTING = ".routing"  # suffix of the points of routing weights
ONLY_BLOCKS = ("attention", "mlp")  # the names of blocks that are the only ones of their kind in a layer


@dataclass(frozen=True)
class Matrix:
    """A linear map of a block: a weight of shape (outputs, inputs) and an optional bias.

    Attributes:
        role: the name of the matrix, unique in its layer.
        reads: the point of its input. Matrices with the same input share its moment.
        feeds: the point of its outputs: another matrix's input or the residual stream. Empty for queries and keys,
            which produce attention scores. `ROLE.out` for outputs that are normed or scaled before they are added to
            the residual stream.
    """

    role: str
    outputs: int
    inputs: int
    bias: bool
    reads: str
    feeds: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weight, (outputs, inputs)."""
        return self.outputs, self.inputs

    @property
    def weight_key(self) -> str:
        """Return the name of the weight among those of its layer."""
        return f"{self.role}.weight"

    @property
    def bias_key(self) -> str:
        """Return the name of the bias among the tensors of its layer."""
        return f"{self.role}.bias"

    @property
    def biases(self) -> int:
        """Count the numbers of the bias."""
        return self.outputs if self.bias else 0

    @property
    def writes_stream(self) -> bool:
        """Return True if the outputs, perhaps normed or scaled, are added to the residual stream."""
        return self.feeds in STREAM_POINTS or self.feeds == f"{self.role}.out"

    @property
    def feeds_matrix(self) -> bool:
        """Return True if another matrix reads these outputs, so that both can lose the same channels."""
        return bool(self.feeds) and not self.writes_stream


def roles_of(matrices: Iterable[Matrix]) -> tuple[str, ...]:
    """Return the roles of some matrices."""
    return tuple(matrix.role for matrix in matrices)


def owner_of(key: str, roles: Iterable[str]) -> str:
    """Return the one of `roles` whose tensor has this key, or the group of a tensor that several roles share.

    `key`: `ROLE.PART` or `GROUP.PART`. A role may contain dots.
    """
    return next((role for role in roles if key.startswith(f"{role}.")), key.partition(".")[0])


@dataclass(frozen=True)
class Block:
    """Matrices that read the block's input, and one that writes to the residual stream.

    Attributes:
        name: unique in the layer.
        reader_group: the name of the readers as one group of matrices; `writer_group`: that of the writer.
        stream: the residual stream after the block.
        out_norm: the role of the norm of the block's output, which few families have.
    """

    reader_group: ClassVar[str]
    writer_group: ClassVar[str]
    stream: ClassVar[str]
    out_norm: ClassVar[str]

    name: str
    readers: tuple[Matrix, ...]
    writer: Matrix

    @property
    def input(self) -> str:
        """Return the point that the readers read."""
        return self.readers[0].reads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return all matrices, the readers first."""
        return (*self.readers, self.writer)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of all matrices, the readers' first."""
        return roles_of(self.matrices)

    @property
    def by_input(self) -> dict[str, tuple[Matrix, ...]]:
        """Group the matrices by their input: name of the group, unique in the layer → matrices."""
        prefix = "" if self.name in ONLY_BLOCKS else f"{self.name}."
        return {prefix + self.reader_group: self.readers, prefix + self.writer_group: (self.writer,)}


@dataclass(frozen=True)
class AttentionBlock(Block):
    """Queries, keys, values and the output projection. Query heads may share key and value heads.

    `sinks`: each query head has an additional score without a value, so that attention weights sum to less than 1.
    """

    reader_group: ClassVar[str] = "query_key_value"
    writer_group: ClassVar[str] = "output"
    stream: ClassVar[str] = "mid"
    out_norm: ClassVar[str] = "attention_out_norm"

    heads: int
    kv_heads: int
    head_dim: int
    sinks: bool = False

    @property
    def query(self) -> Matrix:
        """Return the matrix of the queries, (heads · head_dim, hidden)."""
        return self.readers[0]

    @property
    def key(self) -> Matrix:
        """Return the matrix of the keys, (kv_heads · head_dim, hidden)."""
        return self.readers[1]

    @property
    def value(self) -> Matrix:
        """Return the matrix of the values, (kv_heads · head_dim, hidden)."""
        return self.readers[2]

    @property
    def query_key(self) -> tuple[Matrix, Matrix]:
        """Return the two matrices that produce the attention scores."""
        return self.query, self.key

    @property
    def value_output(self) -> tuple[Matrix, Matrix]:
        """Return the matrix of the values and the output projection."""
        return self.value, self.writer

    @property
    def cache_numbers(self) -> int:
        """Count the numbers that the dense block caches per token, keys and values together."""
        return self.key.outputs + self.value.outputs


@dataclass(frozen=True)
class Latent:
    """A vector between two matrices, with an RMS norm.

    Attributes:
        name: the name of the group of its roles.
        field: the config field that holds its width.
        writer: its first `width` outputs are the latent; the others, the rotated part of keys, bypass the norm.
        norm: the role of the norm.
        reader: the matrix that reads the normed latent.
        cached: the cache holds the normed latent, and the writer's other outputs.
        step: the width is a multiple of this number.
    """

    name: str
    field: str
    writer: Matrix
    norm: str
    reader: Matrix
    cached: bool = False
    step: int = 1

    @property
    def width(self) -> int:
        """Return the width of the latent."""
        return self.reader.inputs

    @property
    def roles(self) -> tuple[str, str, str]:
        """Return the roles of the writer, the norm and the reader."""
        return self.writer.role, self.norm, self.reader.role


@dataclass(frozen=True)
class LatentAttentionBlock(Block):
    """Multi-head latent attention: keys and values are computed from one latent of a token; queries may have another.

    Attributes:
        heads: the number of heads of queries, keys and values. The reader of keys and values has, head by head,
            `key_width` rows of keys and `value_width` rows of values.
    """

    reader_group: ClassVar[str] = "latents"
    writer_group: ClassVar[str] = "output"
    stream: ClassVar[str] = "mid"
    out_norm: ClassVar[str] = "attention_out_norm"

    latents: tuple[Latent, ...]
    heads: int
    key_width: int
    value_width: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return all matrices: the readers of the input, the readers of latents, and the writer."""
        return (*self.readers, *(latent.reader for latent in self.latents), self.writer)

    @property
    def by_input(self) -> dict[str, tuple[Matrix, ...]]:
        """Group the matrices by their input. The reader of a latent is a group with the name of its role."""
        return {**super().by_input, **{latent.reader.role: (latent.reader,) for latent in self.latents}}


@dataclass(frozen=True)
class MLPBlock(Block):
    """One or two readers, an activation, and a writer: writer(act(reader 0) ⊙ reader 1).

    Clamped channels are another function of both readers.

    Attributes:
        width: the number of channels between readers and writer.
        activation: its name in transformers. It acts on the outputs of the first reader.
        routing: if the block is an expert, the point of its routing weight of each token, one number p, 0 for tokens
            that are not routed to it. The weight multiplies the channels, so that `writer.reads` has p h.
        weighed: if routing weights multiply the inputs instead, the point of the unweighted inputs; the readers read
            p x. Empty for other blocks.
        share: the share of the tokens that pass the block if routing is even; 1 unless it is an expert.
        clamp: alpha and limit of clamped channels (`lamina.activation_lamina.Channels`).
    """

    reader_group: ClassVar[str] = "gate_up"
    writer_group: ClassVar[str] = "down"
    stream: ClassVar[str] = "out"
    out_norm: ClassVar[str] = "mlp_out_norm"

    width: int
    activation: str
    routing: str = ""
    share: float = 1.0
    clamp: tuple[float, float] | None = None
    weighed: str = ""

    @property
    def passing(self) -> str:
        """Return the point with the inputs of all tokens, of which an expert reads some, perhaps weighted."""
        return self.weighed or self.input

    def numbers(self, width: float) -> float:
        """Count the numbers, including biases, that the block stores with `width` channels."""
        channel = sum(matrix.inputs + matrix.bias for matrix in self.readers) + self.writer.outputs
        return channel * width + self.writer.biases

    @property
    def gated(self) -> bool:
        """Return True if a second reader multiplies the activated channels."""
        return len(self.readers) > 1


@dataclass(frozen=True)
class Copied:
    """Tensors of a layer that no method changes.

    Attributes:
        shapes: the end of a tensor's name, after the module's path -> shape.
        reads: the point whose values the module reads; empty if there is none.
    """

    role: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    reads: str = ""


def mixture_blocks(
    mixture: Mapping[str, Any],
    layer: int,
    hidden: int,
    activation: str,
    clamp: tuple[float, float] | None = None,
) -> tuple[tuple[MLPBlock, ...], tuple[Copied, ...]]:
    """Return the experts of a layer, the shared one last, and the router; empty for a layer with a dense MLP.

    `mixture`: from the standard config. All experts read `mlp.in`. An expert's writer reads its channels times the
    routing weight, on the tokens that are routed to it. If the weight multiplies the inputs instead, each expert's
    readers have their own point.
    """
    sizes = mixture_of(mixture, layer)
    if sizes is None:
        return (), ()
    experts = []
    for name in expert_blocks(sizes):
        width, inside = sizes.width_of(name), f"{name}.down.in"
        bias = has_biases(mixture, name)
        weighed = name != SHARED and mixture["weighs"] == INPUTS
        reads = f"{name}.in" if weighed else "mlp.in"
        roles = (role for role in ("gate", "up") if role in mixture["modules"])
        readers = (Matrix(f"{name}.{role}", width, hidden, bias, reads, inside) for role in roles)
        writer = Matrix(f"{name}.down", hidden, width, bias, inside, "out")
        routing = f"{name}{ROUTING}" if name != SHARED or mixture["shared_gate"] else ""
        share = 1.0 if name == SHARED else sizes.top_k / sizes.experts
        before = "mlp.in" if weighed else ""
        experts.append(MLPBlock(name, tuple(readers), writer, width, activation, routing, share, clamp, before))
    shapes: list[tuple[str, tuple[int, ...]]] = [("weight", (sizes.experts, hidden))]
    shapes += [("bias", (sizes.experts,))] if mixture["logit_bias"] else []
    copied = [Copied(ROUTER, tuple(shapes), "mlp.in")]
    if mixture["score_bias"]:
        copied.append(Copied(ROUTER_BIAS, ((mixture["score_bias"].rpartition(".")[2], (sizes.experts,)),)))
    if mixture["shared_gate"] and sizes.shared_width:
        copied.append(Copied(SHARED_GATE, (("weight", (1, hidden)),)))
    return tuple(experts), tuple(copied)


def dense_blocks(
    shape: LayerShape, activation: str, clamp: tuple[float, float] | None = None, scaled: bool = False
) -> tuple[Block, ...]:
    """Return the attention block and the MLP block of a dense layer, as far as it has them and they are not foreign.

    Args:
        shape: without `gate` among its modules, the MLP has one reader; without `q` or `down`, there is no block.
        activation: that of the MLP; `clamp`: of clamped channels, as in `MLPBlock`.
        scaled: outputs are multiplied by a number before they are added to the residual stream.
    """
    modules = shape.modules

    def matrix(role: str, reads: str, feeds: str = "") -> Matrix:
        inputs, outputs = shape.widths(role)
        return Matrix(role, outputs, inputs, role in shape.biases, reads, feeds)

    def writer(role: str, kind: type[Block]) -> Matrix:
        changed = scaled or kind.out_norm in modules
        return matrix(role, f"{role}.in", f"{role}.out" if changed else kind.stream)

    attention = AttentionBlock(
        name="attention",
        readers=(
            matrix("q", "attention.in"),
            matrix("k", "attention.in"),
            matrix("v", "attention.in", "o.in"),
        ),
        writer=writer("o", AttentionBlock),
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        sinks=SINKS in modules,
    )
    mlp = MLPBlock(
        name="mlp",
        readers=tuple(matrix(role, "mlp.in", "down.in") for role in ("gate", "up") if role in modules),
        writer=writer("down", MLPBlock),
        width=shape.intermediate_size,
        activation=activation,
        clamp=clamp,
    )
    return tuple(block for block in (attention, mlp) if block.writer.role in modules)
