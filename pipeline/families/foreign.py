"""Foreign attention, run by transformers' own modules; of latent attention, the sizes, matrices and tensor shapes.

`lamina.foreign_lamina` names the modules and the config fields that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lamina.foreign_lamina import FOREIGN, LATENT_CACHE, LATENTS, foreign_cache_numbers, rank_step
from manifests.errors import InputError
from pipeline.families.blocks import Copied, Latent, LatentAttentionBlock, Matrix


@dataclass(frozen=True)
class ForeignBlock:
    """An attention block that transformers runs. Unclaimed tensors are copied bit for bit.

    Attributes:
        block: its matrices, if it is latent attention that methods may compress.
        copied: the tensors of its modules.
        scores: the roles whose outputs produce attention scores. A kernel replaces non-finite scores by zeros.
        heads: the number of query heads.
        query_features: the width of all query heads together.
        cache_numbers: the numbers that are cached per token; those of a hybrid's layers follow from their type.
    """

    block: LatentAttentionBlock | None
    copied: tuple[Copied, ...]
    scores: tuple[str, ...]
    heads: int
    query_features: int
    cache_numbers: int = 0


@dataclass(frozen=True)
class ForeignFamily:
    """The foreign attention of a family.

    Attributes:
        model_type: the family's model type in transformers.
        block: (fields, hidden, heads, roles with a bias) -> the block of a layer.
        rotary_width: the field with the width of the rotation; empty if it equals the width of heads.
        check: fields -> faults.
        layers: for a hybrid, layer type -> a function that builds the block of such a layer from the config's fields.
        kinds: if the config has no layer types, the field that lists the kinds of layers, and kind -> layer type.
    """

    model_type: str
    block: Callable[[Mapping[str, Any], int, int, Collection[str]], ForeignBlock] | None
    rotary_width: str
    check: Callable[[Mapping[str, Any]], list[str]]
    layers: Mapping[str, Callable[[Mapping[str, Any]], ForeignBlock]] = field(default_factory=dict)
    kinds: tuple[str, Mapping[str, str]] | None = None

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Return the source's fields that the module reads."""
        return FOREIGN[self.model_type].fields

    def block_of(self, standard: Mapping[str, Any], layer: int) -> ForeignBlock | None:
        """Return the block of a layer of this standard config; None if the layer's attention is not foreign."""
        if self.block is not None:
            sizes = standard["foreign"], standard["hidden_size"], standard["num_attention_heads"]
            return self.block(*sizes, standard["block"]["biases"])
        layer_type = standard["layer_types"][layer]
        if (block := self.layers.get(layer_type)) is None:
            return None
        fields = {**standard, **standard["foreign"]}
        return replace(block(fields), cache_numbers=FOREIGN[self.model_type].layers[layer_type].cache_numbers(fields))

    def roles(self, standard: Mapping[str, Any]) -> set[str]:
        """Return the roles of foreign attention in all layers of a model with this standard config."""
        if self.block is not None:
            return {each.role for each in self.block(standard["foreign"], 1, 1, ()).copied}
        blocks = (block({**standard, **standard["foreign"]}) for block in self.layers.values())
        return {each.role for block in blocks for each in block.copied}

    def layer_types(self, standard: Mapping[str, Any]) -> list[str] | None:
        """Return the types of all layers if the config only has kinds; None if it has types.

        Raises InputError if their number differs from the number of layers.
        """
        count = standard["num_hidden_layers"]
        if self.kinds is None:
            return [next(iter(self.layers))] * count if len(self.layers) == 1 else None
        name, types = self.kinds
        if len(kinds := standard["foreign"][name]) != count:
            raise InputError(f"config.json: {name}: has {len(kinds)} entries for {count} layers")
        return [types[kind] for kind in kinds]

    def standard(self, source: Any) -> dict[str, Any]:
        """Return the standard `foreign` of a source's config. Raises InputError if no module can be built from it."""
        fields = {name: getattr(source, name) for name in self.own_fields}
        if faults := self.check(fields):
            raise InputError("config.json:\n  " + "\n  ".join(faults))
        return {"model_type": self.model_type, **fields}


def sequence_limit(standard: Mapping[str, Any]) -> tuple[str, int]:
    """Return the field that limits the length of a job's samples, and the limit in tokens.

    A job runs layers one at a time, so a layer that shares another layer's indexer attends to all tokens. This equals
    the indexer's choice only in samples of at most `index_topk` tokens.
    """
    limits = {"max_position_embeddings": standard["max_position_embeddings"]}
    foreign = standard.get("foreign") or {}
    if SHARED in (foreign.get("indexer_types") or ()):
        limits["index_topk"] = foreign["index_topk"]
    return min(limits.items(), key=lambda limit: limit[1])


SHARED = "shared"  # the kind of a layer that shares another layer's indexer
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_ROLES = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
                "o_proj")  # fmt: skip
LATENT_MODULES = {role: f"self_attn.{role}" for role in LATENT_ROLES}
LATENT_READERS = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")  # they read the normed hidden states
LATENT_READS = dict.fromkeys(LATENT_READERS, "attention.in")
LATENT_FEEDS = {"o_proj": "mid"}
LATENT_NAMES = {"kv_lora_rank": "key_value_latent", "q_lora_rank": "query_latent"}
LATENT_BIASES = dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"), "attention_bias")


def latent_attention(fields: Mapping[str, Any], hidden: int, heads: int, biased: Collection[str]) -> ForeignBlock:
    """Return multi-head latent attention: keys and values from one latent per token; queries may have another."""
    latent, nope, rope, value = (fields[name] for name in LATENT_SIZES)
    query, rank = heads * (nope + rope), fields["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (query, rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    queries = "q_proj" if rank is None else "q_b_proj"
    copied = tuple(
        Copied(
            role,
            (("weight", shape), *([("bias", shape[:1])] if role in biased else [])),
            "attention.in" if role in LATENT_READERS else "",
        )
        for role, shape in shapes.items()
    )
    matrices = {
        role: Matrix(
            role, shape[0], shape[1], role in biased, LATENT_READS.get(role, f"{role}.in"), LATENT_FEEDS.get(role, "")
        )
        for role, shape in shapes.items()
        if len(shape) > 1
    }
    step = rank_step(fields)
    latents = tuple(
        Latent(LATENT_NAMES[field], field, matrices[writer], norm, matrices[reader], field in LATENT_CACHE, step)
        for field, (writer, norm, reader) in LATENTS.items()
        if writer in matrices
    )
    readers = tuple(matrix for matrix in matrices.values() if matrix.role in LATENT_READERS)
    block = LatentAttentionBlock("attention", readers, matrices["o_proj"], latents, heads, nope, value)
    return ForeignBlock(
        block, copied, (queries, "kv_a_proj_with_mqa", "kv_b_proj"), heads, query, foreign_cache_numbers(fields)
    )


def copied_latent_attention(sizes: Mapping[str, Any], layer_type: str) -> ForeignBlock:
    """Return latent attention of a hybrid's layers of one type, which no method compresses."""
    biased = LATENT_BIASES if sizes["attention_bias"] else ()
    fields = {**sizes, "model_type": "deepseek_v3"}
    latent = latent_attention(fields, sizes["hidden_size"], sizes["num_attention_heads"], biased)
    copied = tuple(replace(each, role=f"{layer_type}.{each.role}", reads="") for each in latent.copied)
    return replace(latent, block=None, copied=copied, scores=tuple(f"{layer_type}.{role}" for role in latent.scores))


def copied_modules(
    layer_type: str, shapes: Mapping[str, tuple[int, ...]], biased: Collection[str] = ()
) -> tuple[Copied, ...]:
    """Return the modules of a hybrid's layers of one type: name -> the shape of the weight, whose rows a bias has."""
    return tuple(
        Copied(f"{layer_type}.{name}", (("weight", shape), *([("bias", shape[:1])] if name in biased else [])))
        for name, shape in shapes.items()
    )


def copied_attention(sizes: Mapping[str, Any], layer_type: str, gates: bool = False) -> ForeignBlock:
    """Return grouped attention of a hybrid's layers of one type.

    `sizes`: without `attention_bias`, its module has no biases. `gates`: the query matrix also computes a gate for each
    number of the heads' outputs.
    """
    hidden, head_dim, heads = sizes["hidden_size"], sizes["head_dim"], sizes["num_attention_heads"]
    outputs, keys = heads * head_dim, sizes["num_key_value_heads"] * head_dim
    queries = 2 * outputs if gates else outputs
    rows = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, outputs))
    biased = ATTENTION_MODULES if sizes.get("attention_bias", False) else ()
    copied = copied_modules(layer_type, dict(zip(ATTENTION_MODULES, rows, strict=True)), biased)
    scores = tuple(f"{layer_type}.{name}" for name in ATTENTION_MODULES[:2])
    return ForeignBlock(None, copied, scores, heads, queries)


def latent_faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module of latent attention can be built."""
    sizes = {name: fields[name] for name in LATENT_SIZES}
    if fields["q_lora_rank"] is not None:
        sizes["q_lora_rank"] = fields["q_lora_rank"]
    switches = [name for name in ("attention_bias", "rope_interleave") if name in fields]
    return size_faults(sizes, sizes) + switch_faults(fields, switches)


def size_faults(fields: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a fault for each named field that is not a positive integer."""
    return [
        f"{name}: {fields[name]!r:.80} is not a positive integer"
        for name in names
        if type(fields[name]) is not int or fields[name] < 1
    ]


def switch_faults(fields: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a fault for each named field that is neither true nor false."""
    return [
        f"{name}: {fields[name]!r:.80} is neither true nor false"
        for name in names
        if not isinstance(fields[name], bool)
    ]


def _even_faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of odd sizes: DeepSeek-V2's module views pairs of numbers as complex numbers."""
    return latent_faults(fields) or [
        f"{name}: {fields[name]} is odd, which transformers' deepseek_v2 does not compute in float32"
        for name in ("kv_lora_rank", "qk_nope_head_dim")
        if fields[name] % 2
    ]


def latent_family(model_type: str, even: bool = False) -> ForeignFamily:
    """Return the latent attention of a family in transformers. `even`: refuse odd sizes."""
    return ForeignFamily(model_type, latent_attention, "qk_rope_head_dim", _even_faults if even else latent_faults)
