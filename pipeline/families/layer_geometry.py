"""The geometry of one decoder layer: its blocks and norms, and the names, shapes and bytes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from lamina.block_lamina import HEAD_NORM_ROLES, INPUT_NORM_ROLES, OUTPUT_NORM_ROLES, LayerShape, has_norm_bias
from lamina.mixture_lamina import ROUTER, SHARED, SHARED_GATE
from pipeline.families.blocks import (
    ONLY_BLOCKS,
    ROUTING,
    AttentionBlock,
    Block,
    Copied,
    LatentAttentionBlock,
    Matrix,
    MLPBlock,
)
from pipeline.families.foreign import ForeignBlock

NORM_ROLES = (*INPUT_NORM_ROLES, *OUTPUT_NORM_ROLES, *HEAD_NORM_ROLES)


@dataclass(frozen=True)
class Norm:
    """A norm of a layer: a weight of `size` numbers, and perhaps a bias of the same size."""

    role: str
    size: int
    bias: bool


def norms_of(block: Mapping[str, Any], shape: LayerShape) -> tuple[Norm, ...]:
    """Return the norms of a layer with this block: of the blocks' inputs and outputs, and of query and key heads."""
    biased = has_norm_bias(block)
    return tuple(
        Norm(role, shape.norm_width(role, block), biased and role not in HEAD_NORM_ROLES)
        for role in shape.modules
        if role in NORM_ROLES
    )


@dataclass(frozen=True)
class LayerGeometry:
    """A decoder layer: its blocks and norms, and the names of its tensors. Layers may differ.

    Attributes:
        index: the number of the layer, from 0.
        prefix: the prefix of the names of its tensors, with the trailing dot.
        blocks: attention and MLP, or the experts of a mixture, in the order of the forward pass; a layer may lack one.
        foreign: attention that transformers runs, which is not among the blocks.
        routing: the fields of the router's rule, named as in the standard config's `mixture`, and `top_k`.
        copied: further tensors that no method changes: those of a router and of foreign attention.
        modules: role -> module path inside the layer, in the family's order.
        bits: the bits of most stored numbers, the unit in which indices are counted.
        own_bits: `role.weight` or `role.bias` -> bits of a number, for tensors in another dtype.
        own_bytes: for weights in a storage format: `role.weight`, its bytes in the source, and whether OUTPUT may keep
            the format.
        outer: role -> module path and shape of matrices outside of the layers: `embed` belongs to the first layer,
            `head` to the last. They are included only on request.
        frequencies: the angle per position of each pair of a head's dimensions; empty with `latent_class_faults`.
        parallel: attention and MLP both read the layer's inputs.
    """

    model_type: str
    index: int
    prefix: str
    hidden: int
    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]
    modules: tuple[tuple[str, str], ...]
    bits: int
    outer: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    own_bits: tuple[tuple[str, int], ...] = ()
    own_bytes: tuple[tuple[str, int, bool], ...] = ()
    foreign: ForeignBlock | None = None
    copied: tuple[Copied, ...] = ()
    routing: tuple[tuple[str, Any], ...] = ()
    frequencies: tuple[float, ...] = ()
    parallel: bool = False

    @property
    def attention(self) -> AttentionBlock:
        """Return the attention block. Raises ValueError if attention is foreign."""
        if not self.attentions:
            raise ValueError(foreign_attention_fault([self]))
        return self.attentions[0]

    @property
    def attentions(self) -> tuple[AttentionBlock, ...]:
        """Return the attention blocks that can be compressed: one, or none if attention is foreign."""
        return tuple(block for block in self.blocks if isinstance(block, AttentionBlock))

    @property
    def latent_attention(self) -> LatentAttentionBlock | None:
        """Return the block of latent attention, or None."""
        return self.foreign.block if self.foreign else None

    @property
    def foreign_roles(self) -> tuple[str, ...]:
        """Return the roles of foreign attention."""
        return tuple(each.role for each in self.foreign.copied) if self.foreign else ()

    @property
    def foreign_linears(self) -> tuple[str, ...]:
        """Return the roles of foreign attention that have a matrix."""
        return tuple(role for role in self.foreign_roles if len(self.role_shapes(role).get("weight", ())) == 2)

    @property
    def query_features(self) -> int:
        """Return the width of all query heads together."""
        return self.foreign.query_features if self.foreign else sum(each.query.outputs for each in self.attentions)

    @property
    def query_heads(self) -> int:
        """Return the number of query heads."""
        return self.foreign.heads if self.foreign else sum(each.heads for each in self.attentions)

    @property
    def cache_numbers(self) -> int:
        """Count the numbers that the dense layer caches per token."""
        return self.foreign.cache_numbers if self.foreign else sum(each.cache_numbers for each in self.attentions)

    @property
    def score_roles(self) -> tuple[str, ...]:
        """Return the roles whose outputs enter attention scores: q and k, or the norms of their heads."""
        if self.foreign:
            return self.foreign.scores
        roles = (matrix.role for block in self.attentions for matrix in block.query_key)
        return tuple(f"{role}_norm" if f"{role}_norm" in self.roles else role for role in roles)

    @cached_property
    def mlps(self) -> tuple[MLPBlock, ...]:
        """Return the MLP blocks."""
        return tuple(block for block in self.blocks if isinstance(block, MLPBlock))

    def block(self, name: str) -> Block:
        """Return the block of this name. Raises ValueError if the layer has none."""
        (block,) = (block for block in self.blocks if block.name == name)
        return block

    def block_of(self, role: str) -> Block:
        """Return the block that a role belongs to. Raises KeyError if there is none."""
        return self._block_by_role[role]

    @property
    def matrix_blocks(self) -> tuple[Block, ...]:
        """Return latent attention, if the layer has it, and the blocks."""
        return self.blocks if self.latent_attention is None else (self.latent_attention, *self.blocks)

    @cached_property
    def _block_by_role(self) -> dict[str, Block]:
        by_role: dict[str, Block] = {role: block for block in self.matrix_blocks for role in block.roles}
        if latent := self.latent_attention:
            by_role |= dict.fromkeys((each.norm for each in latent.latents), latent)
        return by_role

    def mlp_of(self, role: str) -> MLPBlock:
        """Return the MLP block that a role belongs to. Raises KeyError if there is none."""
        block = self.block_of(role)
        if not isinstance(block, MLPBlock):
            raise KeyError(role)
        return block

    @cached_property
    def matrices(self) -> Mapping[str, Matrix]:
        """Map each role to its matrix, for all blocks in order."""
        return {matrix.role: matrix for block in self.matrix_blocks for matrix in block.matrices}

    @property
    def points(self) -> tuple[str, ...]:
        """Return the points that matrices read, in the order of the forward pass."""
        return tuple(dict.fromkeys(matrix.reads for matrix in self.matrices.values()))

    @cached_property
    def experts(self) -> tuple[MLPBlock, ...]:
        """Return the blocks of routed experts; empty for a dense MLP."""
        return tuple(block for block in self.mlps if block.roles[0] in self.routed_roles)

    @cached_property
    def expert_points(self) -> tuple[str, ...]:
        """Return the points that the writers of routed experts read; empty for a dense MLP."""
        return tuple(block.writer.reads for block in self.experts)

    @cached_property
    def expert_at(self) -> Mapping[str, MLPBlock]:
        """Map each point that the tokens of a single expert pass to its block."""
        inputs = {block.readers[0].reads: block for block in self.experts if block.weighed}
        return inputs | {block.writer.reads: block for block in self.experts}

    @property
    def corrected_points(self) -> tuple[tuple[str, ...], ...]:
        """Return the points in the order of the forward pass, with those of routed experts' writers together."""
        together = {point: self.expert_points for point in self.expert_points}
        return tuple(dict.fromkeys(together.get(point, (point,)) for point in self.points))

    @property
    def attention_steps(self) -> int | None:
        """Count the `corrected_points` of the attention, which come before those of the MLP. None if the MLP does not
        read what the attention writes."""
        attending = {matrix.reads for block in self.matrix_blocks if block.stream == "mid" for matrix in block.matrices}
        follows = bool(self.mlps) and not self.parallel
        return sum(attending.issuperset(points) for points in self.corrected_points) if follows else None

    def features(self, point: str) -> int:
        """Return the width of a point: of a matrix's input or output, or of the residual stream."""
        return self._features.get(point, self.hidden)

    @cached_property
    def _features(self) -> dict[str, int]:
        latents = self.latent_attention.latents if self.latent_attention else ()
        outputs = {f"{matrix.role}.out": matrix.outputs for matrix in self.matrices.values()}
        inputs = {matrix.reads: matrix.inputs for matrix in self.matrices.values()}
        inputs |= {f"pull:{latent.reader.role}": latent.width for latent in latents}
        return outputs | inputs | {block.routing: 1 for block in self.mlps if block.routing}

    def share(self, point: str) -> float:
        """Return the share of the tokens that pass a point if routing is even."""
        return self._shares.get(point, 1.0)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Map the points inside routed experts to the experts' shares."""
        routed = [block for block in self.mlps if block.share < 1.0]
        outputs = {f"{matrix.role}.out": block.share for block in routed for matrix in block.matrices}
        weighed = {block.input: block.share for block in routed if block.weighed}
        return outputs | weighed | {block.writer.reads: block.share for block in routed}

    @cached_property
    def passed_numbers(self) -> float:
        """Return the numbers of the matrices that a token passes, if routing is even."""
        idle = sum((1.0 - block.share) * block.numbers(block.width) for block in self.mlps)
        return self.numbers() - idle

    @property
    def reads(self) -> dict[str, str]:
        """Map each role, including the head but not an embedding, to the point that its matrix reads."""
        inside = {role: matrix.reads for role, matrix in self.matrices.items()}
        return inside | {role: f"{role}.in" for role, _, _ in self.outer if role == "head"}

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of matrices and norms, in the family's order."""
        return tuple(role for role, _ in self.modules)

    @cached_property
    def unlike_experts(self) -> tuple[MLPBlock, ...]:
        """Return an expert for each point of inputs and width."""
        return tuple({(block.passing, block.width): block for block in self.experts}.values())

    @cached_property
    def num_experts(self) -> int:
        """Return the number of routed experts; 0 for a dense MLP."""
        return sum(block.name not in (*ONLY_BLOCKS, SHARED) for block in self.mlps)

    @cached_property
    def routed_roles(self) -> frozenset[str]:
        """Return the roles of routed experts; empty for a dense MLP."""
        experts = (block for block in self.mlps if block.name not in (*ONLY_BLOCKS, SHARED))
        return frozenset(role for block in experts for role in block.roles)

    @cached_property
    def linear_roles(self) -> tuple[str, ...]:
        """Return the roles of matrices, in the family's order."""
        return tuple(role for role in self.roles if role in self.matrices)

    def weight_shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of the dense weight of a role: (out, in) of a matrix, (size,) of a norm."""
        return self._shapes[role]["weight"]

    def role_shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        """Map `weight` and, if the module has one, `bias` to their shapes."""
        return self._shapes[role]

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        shapes: dict[str, dict[str, tuple[int, ...]]] = {role: {"weight": shape} for role, _, shape in self.outer}
        for norm in self.norms:
            shapes[norm.role] = _with_bias((norm.size,), norm.bias)
        for role, matrix in self.matrices.items():
            shapes[role] = _with_bias(matrix.shape, matrix.bias)
        return shapes | {each.role: dict(each.shapes) for each in self.copied}

    def path(self, role: str) -> str:
        """Return the module path of a role in the checkpoint."""
        return self._paths[role]

    @cached_property
    def _paths(self) -> dict[str, str]:
        inside = {role: self.prefix + path for role, path in self.modules}
        return inside | {role: path for role, path, _ in self.outer}

    def tap(self, point: str) -> tuple[str, str]:
        """Return the role and the side, `in` or `out`, at which a forward hook sees the values of a point."""
        readers = {block.input: block.readers[0].role for block in self.matrix_blocks}
        if point in readers:
            # A router sees all tokens, unlike the experts.
            copied = (each.role for each in self.copied if each.reads == point)
            return next(copied, readers[point]), "in"
        if point.endswith(ROUTING):
            return SHARED_GATE if point == f"{SHARED}{ROUTING}" else ROUTER, "out"
        role, _, side = point.rpartition(".")
        return role, side

    def group_path(self, roles: tuple[str, ...], name: str) -> str:
        """Return the module path of tensors that the roles of a group share.

        The path is NAME below the deepest module that holds all matrices of the roles' block. For a group with the name
        of its block, it is that module itself or, if that module is the layer, `NAME_factors`.
        """
        block, modules = self.block_of(roles[0]), dict(self.modules)
        parents = [modules[role].split(".")[:-1] for role in block.roles]
        shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
        inside = [*shared, name] if name != block.name else shared or [f"{name}_factors"]
        return self.prefix + ".".join(inside)

    def tensor_name(self, key: str, roles: tuple[str, ...]) -> str:
        """Return the name in the checkpoint of `ROLE.PART`, or of `GROUP.PART` for the group of `roles`."""
        parts = key.split(".")
        for length in reversed(range(1, len(parts))):
            role, part = ".".join(parts[:length]), ".".join(parts[length:])
            if role in self._paths and not part.startswith("pivoted."):
                return f"{self.path(role)}.{part}"
        block = self.block_of(roles[0]).name
        group = block if key.startswith(f"{block}.") else key.partition(".")[0]
        return f"{self.group_path(roles, group)}.{key.removeprefix(f'{group}.')}"

    def tensors(self, roles: Collection[str] | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Map `role.weight` and `role.bias` of all or some roles to their names in the checkpoint and their shapes."""
        return {
            f"{role}.{part}": (f"{self.path(role)}.{part}", shape)
            for role in (self.roles if roles is None else self._in_order(roles))
            for part, shape in self.role_shapes(role).items()
        }

    def _in_order(self, roles: Collection[str]) -> list[str]:
        """Return roles in the family's order, with roles outside of the layer last."""
        return sorted({role for role in roles if role in self._places}, key=self._places.__getitem__)

    @cached_property
    def _places(self) -> dict[str, int]:
        roles = dict.fromkeys((*self.roles, *(role for role, _, _ in self.outer)))
        return {role: place for place, role in enumerate(roles)}

    def numbers(self, roles: Collection[str] | None = None) -> int:
        """Count the numbers that the dense layer, or some of its roles, stores."""
        return sum(math.prod(shape) for _, shape in self.tensors(roles).values())

    def bits_of(self, key: str) -> int:
        """Return the bits of a stored number of `role.weight` or `role.bias`."""
        return self._own_bits.get(key, self.bits)

    @cached_property
    def _own_bits(self) -> dict[str, int]:
        return dict(self.own_bits)

    def held_roles(self, experts: int) -> tuple[str, ...]:
        """Return the roles that a worker holds at a time if it holds `experts` of a layer's experts."""
        routed = [block for block in self.mlps if block.roles[0] in self.routed_roles]
        passing = {role for block in routed[experts:] for role in block.roles}
        return tuple(role for role in self.roles if role not in passing)

    def num_bytes(self, roles: Collection[str] | None = None) -> int:
        """Count the bytes of the dense layer, or of some of its roles, each tensor in its own dtype."""
        return sum(math.prod(shape) * self.bits_of(key) // 8 for key, (_, shape) in self.tensors(roles).items())

    def stored_bytes(self, roles: Collection[str] | None = None) -> int:
        """Count the bytes of the dense layer, or of some of its roles, in the source."""
        return self.num_bytes(roles) - self.saved_bytes(roles)

    def saved_bytes(self, roles: Collection[str] | None = None) -> int:
        """Count the bytes that the source's storage formats save."""
        inside = self.tensors(roles) if self.own_bytes else {}
        return sum(saved for key, (saved, _) in self._saved.items() if key in inside)

    def grown_bytes(self, claimed: Collection[str]) -> int:
        """Count the bytes by which the layer grows if the claimed roles, and formats that OUTPUT cannot keep, are
        decoded."""
        unkept = sum(saved for saved, keeps in self._saved.values() if not keeps)
        inside = self.tensors(claimed) if self.own_bytes else {}
        return unkept + sum(saved for key, (saved, keeps) in self._saved.items() if keeps and key in inside)

    @cached_property
    def _saved(self) -> dict[str, tuple[int, bool]]:
        """Map each weight in a storage format to the saved bytes, and whether OUTPUT may keep the format."""
        shapes = self.tensors() if self.own_bytes else {}
        decoded = {key: math.prod(shape) * self.bits_of(key) // 8 for key, (_, shape) in shapes.items()}
        return {key: (decoded[key] - own, keeps) for key, own, keeps in self.own_bytes}


def foreign_attention_fault(layers: Iterable[LayerGeometry]) -> str:
    """Explain why methods for keys and values of heads do not compress a model with foreign attention."""
    layer = next(layer for layer in layers if layer.foreign)
    if layer.latent_attention is None:
        return f"no method compresses the attention of {layer.model_type} models, which is copied"
    return (
        f"{layer.model_type} models have latent attention, whose keys and values are read from one latent; only "
        "loss_aware with `attention: true` compresses it"
    )


def _with_bias(weight: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    """Map `weight` and, with a `bias`, `bias` to their shapes."""
    return {"weight": weight, "bias": weight[:1]} if bias else {"weight": weight}
