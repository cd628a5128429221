"""Random manifests, by number: every option of every method, alone and together, valid at first sight."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from manifests.quantize import OUTER_ROLES, QUANTIZED_ROLES

TEXT = "text.txt"
TOKENS_PER_NUMBER = 4
Entry = dict[str, Any]
BOTH = (True, False)
SIZES = {"ranks", "keep", "cache_keep"}  # fields that give an entry a size of its own
OPTION_SHARE = 0.35  # how often an option is set
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {  # method -> option -> values
    "flat_llm": {
        "attention": BOTH, "mlp": BOTH, "allocation": ("importance", "uniform", "loss"), "basis": ("value", "context"),
        "weighting": ("none", "output", "loss"), "selection": ("leverage", "eliminate"),
        "query_key": ("none", "head_pca"), "ridge": (0.01, 1.0),
    },
    "lorc": {
        "key": BOTH, "value": BOTH, "allocation": ("progressive", "uniform", "loss"),
        "weighting": ("none", "input", "loss"),
    },
    "joint_rank_k": {
        "query_key": ("joint", "separate", "joint_per_head", "none"), "mlp": (*BOTH, "joint", "separate", "none"),
        "allocation": ("uniform", "loss"), "weighting": ("none", "input", "loss"),
    },
    "lestd": {
        "target": ("attention", "mlp", "both"), "prune": BOTH, "weighting": ("none", "input"), "sweeps": (1, 3),
        "allocation": ("uniform", "loss"), "threshold": ("layer", "model"), "refine_sweeps": (0, 2),
        "core": ("dense", "csr"),
    },
    "loss_aware": {
        "query_key": BOTH, "attention": BOTH, "mlp": BOTH, "factors": ("pivoted", "plain"),
        "correct": ("none", "output"), "weighting": ("loss", "input"), "widths": (1, 4),
    },
    "svd": {},
    "asvd": {"alpha": (0.0, 0.5, 2.0)},
    "svd_llm": {},
    "magnitude": {},
}  # fmt: skip
TOGETHER: tuple[Callable[[Random], list[Entry]], ...] = (  # entries that share no matrix
    lambda random: [{**_draw("flat_llm", random), "attention": False, "mlp": True}, _draw_for_attention(random)],
    lambda random: [{"method": "magnitude"}, _draw_for_attention(random)],
    lambda random: [{"method": "flat_llm", "attention": True, "mlp": False}, {"method": "lestd", "target": "mlp"}],
    lambda random: [{"method": "flat_llm"}, {"method": "joint_rank_k", "mlp": False}],
    lambda random: [{"method": "flat_llm"}, {"method": "lorc", "value": False, "cache_keep": 0.5}],
    lambda random: [{"method": "magnitude", "keep": 0.8}, {"method": "lorc"}],
)
BY_LOSS: tuple[Callable[[Random], Entry], ...] = (
    lambda random: _draw("loss_aware", random),
    lambda random: {"method": "flat_llm", "allocation": "loss"},
    lambda random: {"method": "lorc", "allocation": "loss"},
    lambda random: {"method": "lestd", "target": random.choice(("attention", "mlp")), "allocation": "loss"},
)


def draw_manifest(random: Random, layers: int, positions: int, gated: bool, grouped: bool) -> Entry:
    """Draw the document of a job on `model`, with relative paths. Most are mended, so that few are refused.

    Args:
        layers, positions: of the model.
        gated: its MLP has a gate.
        grouped: scales can be of 32 columns.
    """
    document = _draw_document(random, layers, positions)
    if random.random() < 0.9:
        _mend_entries_(document["methods"], random, layers, gated)
        _mend_blocks_(document, random, grouped)
    return document


def at_full_rank(document: Entry, width: int) -> Entry:
    """Return the same job where nothing is cut off, and nothing rounded.

    Channels that no token uses cost no loss, and ranks that follow the loss cut them at keep: 1. `loss_aware` has no
    other ranks: its text gets some tokens for each of the `width` numbers that a projection reads at most.
    """
    sizes = {*SIZES, "skip_above", "allocation"}
    entries = []
    for entry in document["methods"]:
        options = {key: value for key, value in entry.items() if key not in sizes}
        entries.append(options | {"cache_keep" if entry["method"] == "lorc" else "keep": 1.0})
    blocks = {key: value for key, value in document.items() if key not in ("budget", "quantize", "evaluation")}
    if any(entry["method"] == "loss_aware" for entry in entries):
        calibration = {key: value for key, value in document["calibration"].items() if key != "gradient"}
        samples = math.ceil(TOKENS_PER_NUMBER * width / calibration["sequence_length"])
        blocks["calibration"] = calibration | {"samples": samples, "micro_batch": 8}
    return blocks | {"methods": entries, "output": "full", "run_dir": "full.run"}


def _mend_entries_(entries: list[Entry], random: Random, layers: int, gated: bool) -> None:
    """Change entries so that no two claim one matrix, and each claims some."""
    if len(entries) > 1 and layers > 1 and random.random() < 0.4:
        for place, entry in enumerate(entries):
            entry["layers"] = [layer for layer in range(layers) if layer % len(entries) == place] or [0]
            entry.pop("uniform", None)
        del entries[layers:]
    elif len(entries) > 1:
        entries[:] = random.choice(TOGETHER)(random)
    for entry in entries:
        method = entry["method"]
        if method == "lorc" and not (entry.get("key", True) or entry.get("value", True)):
            entry["value"] = True
        if method in ("flat_llm", "loss_aware") and not (entry.get("attention", True) or entry.get("mlp", True)):
            entry["mlp"] = True
        if entry.get("allocation") == "loss":
            entry.pop("ranks", None)
            if method == "flat_llm":
                entry.pop("query_key", None)
        if method == "lestd" and entry.get("target", "attention") != "attention":
            entry.pop("weighting", None)
        if method == "joint_rank_k" and not gated:
            entry["mlp"] = False
        if entry.get("uniform"):
            entry.pop("layers", None)


def _mend_blocks_(document: Entry, random: Random, grouped: bool) -> None:
    """Give every entry a size, text to those that need it, and scales that fit."""
    entries, quantize = document["methods"], document.get("quantize")
    if quantize and not grouped:
        quantize["group"] = None
        if quantize["bits"] == "auto":
            quantize["bits"] = 4
    if quantize and quantize["bits"] == "auto":
        quantize |= {"group": 32, "feedback": None}
        entries[:] = [random.choice(BY_LOSS)(random)]
        document["budget"] = {"bytes": round(random.uniform(0.2, 0.9), 2)}
    if quantize and not document.get("calibration"):
        quantize.pop("feedback", None)
    if quantize and quantize.get("correct") == "output":
        quantize |= {"bits": 4 if quantize["bits"] == "auto" else quantize["bits"], "feedback": None}
        document.setdefault("calibration", _draw_calibration(random, 20))["propagate"] = "dense"
    if quantize and any(entry["method"] == "lestd" for entry in entries):
        document.pop("quantize")
    if not entries:
        document.pop("budget", None)
    elif "budget" not in document and not all(SIZES & entry.keys() for entry in entries):
        document["budget"] = _draw_budget(random)
    if "budget" in document:
        _mend_budget_(document["budget"], entries, document.get("quantize"))
    by_loss = any("loss" in (entry.get("allocation"), entry.get("weighting")) for entry in entries)
    if by_loss or {"loss_aware", "lestd"} & {entry["method"] for entry in entries}:
        document.setdefault("calibration", _draw_calibration(random, 20))["propagate"] = "dense"
    elif entries and random.random() < 0.9:
        document.setdefault("calibration", _draw_calibration(random, 20))


def _mend_budget_(budget: Entry, entries: list[Entry], quantize: Entry | None) -> None:
    """Keep nats for methods that predict them, and bytes where scales are counted."""
    predicts = all(entry["method"] == "loss_aware" or entry.get("allocation") == "loss" for entry in entries)
    if "max_loss" in budget and not predicts:
        budget["keep"] = max(0.5, budget.pop("max_loss"))
    if "bytes" in budget and quantize and quantize.get("group", 32) is None:
        budget["keep"] = budget.pop("bytes")
    shared = [entry for entry in entries if not SIZES & entry.keys()]
    if any(entry.get("allocation") == "loss" or entry["method"] == "loss_aware" for entry in shared):
        for entry in shared:
            if entry["method"] not in ("loss_aware", "svd", "asvd", "svd_llm", "magnitude"):
                entry["allocation"] = "loss"
                entry.pop("query_key", None)


def _draw_document(random: Random, layers: int, positions: int) -> Entry:
    entries = [_draw_entry(random, layers) for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3)))]
    document: Entry = {
        "version": 1,
        "model": {"source": "model"},
        "output": "output",
        "run_dir": "run",
        "seed": random.randrange(4),
        "methods": entries,
        "workers": {"max": 1},
    }
    if random.random() < 0.85:
        document["calibration"] = _draw_calibration(random, positions)
    if random.random() < 0.65 and entries:
        document["budget"] = _draw_budget(random)
    if random.random() < 0.4 or not entries:
        document["quantize"] = _draw_quantize(random)
    if random.random() < 0.3:
        document["statistics"] = {"keep": random.random() < 0.5}
    if random.random() < 0.3:
        document["resume"] = {"every": random.choice((1, 2, "auto"))}
    if random.random() < 0.25:
        perplexity = {"text": {"files": [TEXT]}, "window": random.choice((7, 16)), "dense": random.random() < 0.5}
        document["evaluation"] = {"perplexity": perplexity}
    return document


def _draw_calibration(random: Random, positions: int) -> Entry:
    samples = random.choice((1, 2, 4, 6))
    calibration: Entry = {
        "text": {"files": [TEXT]},
        "samples": samples,
        "sequence_length": min(random.choice((4, 9, 16, 24)), positions),
        "shards": random.randint(1, min(3, samples)),
        "micro_batch": random.choice((1, 2, 3)),
        "propagate": random.choice(("compressed", "dense", "dense")),
    }
    if random.random() < 0.3:
        calibration["gradient"] = {"kind": random.choice(("model", "local"))}
        if random.random() < 0.5:
            calibration["gradient"]["samples"] = random.randint(1, samples)
    return calibration


def _draw_budget(random: Random) -> Entry:
    kind = random.choice(("keep", "keep", "keep", "bytes", "bytes", "max_loss"))
    budget: Entry = {kind: round(random.uniform(random.choice((0.05, 0.5, 0.5)), 1.0), 2)}
    if random.random() < 0.3:
        budget["scope"] = random.choice(("decoder", "model"))
    if random.random() < 0.25:
        budget["multiple"] = random.choice((1, 2, 4, 8, 16))
    return budget


def _draw_quantize(random: Random) -> Entry:
    quantize: Entry = {"bits": random.choice((8, 4, 3, 2, "auto"))}
    if random.random() < 0.5:
        quantize["levels"] = random.choice(("normal", "learned", "auto"))
    if random.random() < 0.6:
        quantize["group"] = random.choice((32, 32, 64, 128, None))
    if random.random() < 0.4:
        quantize["what"] = random.choice(("factors", "all"))
    if random.random() < 0.25:
        quantize["skip"] = random.sample((*QUANTIZED_ROLES, *OUTER_ROLES), random.randint(1, 3))
    if random.random() < 0.3:
        quantize["feedback"] = random.random() < 0.5
    if random.random() < 0.25:
        quantize["correct"] = "output"
    return quantize


def _draw_entry(random: Random, layers: int) -> Entry:
    entry = _draw(random.choice(tuple(OPTIONS)), random)
    if random.random() < 0.2:
        some = sorted(random.sample(range(layers), random.randint(1, layers)))
        entry["layers"] = random.choice(("all", "last:1", "last:0.5", some))
    if random.random() < 0.35 and not {"ranks", "cache_keep"} & entry.keys():
        entry["keep"] = random.choice((1.0, 0.95, 0.9, 0.7, 0.5, 0.3, 0.1))
    if random.random() < 0.1:
        entry["rank_multiple"] = random.choice((1, 2, 4))
    return entry


def _draw(method: str, random: Random) -> Entry:
    """Draw a method's entry: each option by chance, with one of its values, and sizes of its own."""
    options = OPTIONS[method].items()
    entry: Entry = {name: random.choice(values) for name, values in options if random.random() < OPTION_SHARE}
    if method == "flat_llm" and random.random() < 0.15:
        entry["uniform"] = True
    elif method == "flat_llm" and random.random() < 0.2:
        sizes = {"value": random.randint(1, 16), "mlp": random.randint(1, 80), "query_key": random.choice((2, 4, 6))}
        entry["ranks"] = {name: sizes[name] for name in random.sample(tuple(sizes), random.randint(1, 2))}
    elif method == "lorc" and random.random() < 0.5:
        entry["cache_keep"] = random.choice((0.2, 0.5, 0.8, 1.0))
    elif method == "joint_rank_k" and random.random() < 0.2:
        entry["ranks"] = random.choice(({"query_key": random.randint(1, 40)}, {"mlp": random.randint(1, 40)}))
    elif method == "lestd" and random.random() < 0.25:
        entry["ranks"] = [random.randint(1, 24), random.randint(1, 8), random.randint(1, 4)]
    return {"method": method, **entry}


def _draw_for_attention(random: Random) -> Entry:
    """Draw an entry that leaves the MLP alone."""
    joint = {"query_key": random.choice(("joint", "separate", "joint_per_head")), "mlp": False}
    others = ({"method": "lestd", "target": "attention"}, {"method": "loss_aware", "mlp": False})
    return random.choice((_draw("lorc", random), {"method": "joint_rank_k", **joint}, *others))
