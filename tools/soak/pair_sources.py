"""How a pair's model is stored, by number: its tokenizer, the names of its tensors, and fields that must be refused.

A quarter of the models are mixtures of experts, most with routers that leave experts unseen. The draws are apart from
those of `pair_models` and `pair_manifests`, so that these stay as they are for a number.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.factories import EXPERTS, GEOMETRY, OWN_FIELDS
from tests.renamed_models import HEAD, IN_MEMORY, NEITHER, NO_PREFIX
from tools.soak.pair_models import CHOSEN, FILES, TOKENIZER_SIZE, ModelSpec, builds
from tools.soak.pair_writing import TOKENIZERS, UNKNOWN_FIELD

NAMINGS = (*[FILES] * 5, IN_MEMORY, NO_PREFIX, NEITHER)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "granitemoe", "hunyuan_v1_moe")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of experts, by family
EXPERT_METHODS = ("reap", "frequency", "merge_experts", "heapr", "loss_aware", "svd_llm")
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (  # fields of config.json, and the word that a refusal contains
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"quantization_config": {"quant_method": "quarot", "bits": 4}}, "quarot"),
    ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}, "fp8"),
)


def draw_source(random: Random, spec: ModelSpec) -> ModelSpec:
    """Return the model or another with a tokenizer, names and fields by chance."""
    if random.random() < 0.25:
        spec = _mixture(random, spec)
    tied = spec.config.get("tie_word_embeddings", spec.family == "falcon")
    namings = (*NAMINGS, *[HEAD] * 4) if tied else NAMINGS
    spec = replace(spec, tokenizer=random.choice(tuple(TOKENIZERS)), naming=random.choice(namings))
    if random.random() < 0.05:
        fields, word = random.choice(REFUSED)
        return replace(spec, fields=fields, refused=word)
    planted = random.random() < 0.02  # a field of stored weights, which a reader must not pass over
    if planted and spec.family != "falcon":  # a config without grouped queries is refused before it
        return replace(spec, naming=FILES, encoded="fp8 tensor", refused=UNKNOWN_FIELD)
    return spec


def draw_methods(random: Random, spec: ModelSpec, document: dict[str, Any]) -> dict[str, Any]:
    """Return the document; for some mixtures with a method of experts, for a model that must be refused one that is
    valid."""
    if spec.refused:
        keys = ("version", "model", "output", "run_dir", "seed", "workers")
        return {name: document[name] for name in keys} | {"methods": [{"method": "svd", "keep": 0.5}]}
    if not spec.is_mixture or random.random() < 0.5:
        return document
    entry = {"method": random.choice(EXPERT_METHODS)}
    calibration = document.get("calibration") or {
        "text": {"files": ["text.txt"]}, "samples": 4, "sequence_length": 16, "shards": 2, "micro_batch": 2
    }  # fmt: skip
    return {
        **{name: value for name, value in document.items() if name != "quantize"},
        "methods": [entry],
        "budget": {"keep": random.choice((1.0, 0.99, 0.8, 0.5))},
        "calibration": {**calibration, "propagate": "dense"},
    }


def draw_prefixes(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with prefixes of its windows by chance. The loss of random weights is accepted."""
    drawn = {**document, "model": {**document["model"], "accept_loss": True}}
    if "calibration" in drawn and random.random() < 0.5:
        drawn["calibration"] = {**drawn["calibration"], "prefix": random.choice(("tokenizer", "none"))}
    if "evaluation" in drawn and random.random() < 0.5:
        perplexity = {**drawn["evaluation"]["perplexity"], "prefix": random.choice(("tokenizer", "none"))}
        drawn["evaluation"] = {"perplexity": perplexity}
    return drawn


def _mixture(random: Random, other: ModelSpec) -> ModelSpec:
    """Draw a mixture in float32: a router's choice between equal experts depends on rounding."""
    while True:
        family, layers = random.choice(MIXTURES), random.choice((1, 2, 3))
        fields = {**GEOMETRY, **EXPERTS[family], **OWN_FIELDS.get(family, {}), "num_hidden_layers": layers}
        fields = {name: _cycle(value, layers) for name, value in fields.items()}
        fields |= {name: random.choice((3, 6, 9)) for name in COUNTS if name in fields}
        fields |= {name: random.choice((1, 2)) for name in CHOSEN if name in fields}
        for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
            fields |= {name: random.choice((8, 20, 32))} if name in EXPERTS[family] else {}
        fields["vocab_size"] = random.choice((TOKENIZER_SIZE, 288))
        fields["max_position_embeddings"] = random.choice((24, 64, 128))
        fields["tie_word_embeddings"] = random.random() < 0.4
        spec = replace(
            other, family=family, config=fields, dtype="float32", float_vectors=False, skewed=random.random() < 0.7
        )
        if builds(spec):
            return spec


def _cycle(value: Any, count: int) -> Any:
    return (list(value) * count)[:count] if isinstance(value, tuple) else value
