"""Random manifests, by number: every option of every method, alone and together, valid at first sight."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

TEXT = "text.txt"
TOKENS_PER_NUMBER = 4
Entry = dict[str, Any]


def draw_manifest(random: Random, layers: int, positions: int, gated: bool, grouped: bool) -> Entry:
    """The document of a job on `model`, whose paths are relative.

    Most are mended, so that few are refused. `layers` and `positions`: of the model; `gated`: its MLP has a gate;
    `grouped`: scales can be of 32 columns.
    """
    document = _drawn(random, layers, positions)
    if random.random() < 0.9:
        _mend_entries_(document["methods"], random, layers, gated)
        _mend_blocks_(document, random, grouped)
    return document


def _mend_entries_(entries: list[Entry], random: Random, layers: int, gated: bool) -> None:
    """One entry a matrix, each with something to do."""
    if len(entries) > 1 and layers > 1 and random.random() < 0.4:
        for place, entry in enumerate(entries):
            entry["layers"] = [layer for layer in range(layers) if layer % len(entries) == place] or [0]
            if entry.get("uniform"):
                del entry["uniform"]
        del entries[layers:]
    elif len(entries) > 1:
        entries[:] = random.choice(TOGETHER)(random)
    for entry in entries:
        if entry["method"] == "lorc" and not (entry.get("key", True) or entry.get("value", True)):
            entry["value"] = True
        if entry["method"] in ("flat_llm", "loss_aware") and not (
            entry.get("attention", True) or entry.get("mlp", True)
        ):
            entry["mlp"] = True
        if entry.get("allocation") == "loss":
            entry.pop("ranks", None)
            if entry["method"] == "flat_llm":
                entry.pop("query_key", None)
        if entry["method"] == "lestd" and entry.get("target", "attention") != "attention":
            entry.pop("weighting", None)
        if entry["method"] == "joint_rank_k" and not gated:
            entry["mlp"] = False
        if entry.get("uniform"):
            entry.pop("layers", None)


def _mend_blocks_(document: Entry, random: Random, grouped: bool) -> None:
    """A size for every entry, text for those that need it, scales that fit."""
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
    if quantize and any(entry["method"] == "lestd" for entry in entries):
        document.pop("quantize")
    if not entries:
        document.pop("budget", None)
    elif "budget" not in document and not all({"ranks", "keep", "cache_keep"} & {*entry} for entry in entries):
        document["budget"] = _budget(random)
    if "budget" in document:
        _mend_budget_(document["budget"], entries, document.get("quantize"))
    by_loss = any("loss" in (entry.get("allocation"), entry.get("weighting")) for entry in entries)
    if by_loss or {"loss_aware", "lestd"} & {entry["method"] for entry in entries}:
        document.setdefault("calibration", _calibration(random, 20))["propagate"] = "dense"
    elif entries and random.random() < 0.9:
        document.setdefault("calibration", _calibration(random, 20))


def _mend_budget_(budget: Entry, entries: list[Entry], quantize: Entry | None) -> None:
    """Nats for methods that predict them; bytes where scales are counted."""
    predicts = all(entry["method"] == "loss_aware" or entry.get("allocation") == "loss" for entry in entries)
    if "max_loss" in budget and not predicts:
        budget["keep"] = max(0.5, budget.pop("max_loss"))
    if "bytes" in budget and quantize and quantize.get("group", 32) is None:
        budget["keep"] = budget.pop("bytes")
    shared = [entry for entry in entries if not {"ranks", "keep", "cache_keep"} & {*entry}]
    if any(entry.get("allocation") == "loss" or entry["method"] == "loss_aware" for entry in shared):
        for entry in shared:
            if entry["method"] not in ("loss_aware", "svd", "asvd", "svd_llm", "magnitude"):
                entry["allocation"] = "loss"
                entry.pop("query_key", None)


def _drawn(random: Random, layers: int, positions: int) -> Entry:
    entries = [_entry(random, layers) for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3)))]
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
        document["calibration"] = _calibration(random, positions)
    if random.random() < 0.65 and entries:
        document["budget"] = _budget(random)
    if random.random() < 0.4 or not entries:
        document["quantize"] = _quantize(random)
    if random.random() < 0.3:
        document["statistics"] = {"keep": random.random() < 0.5}
    if random.random() < 0.3:
        document["resume"] = {"every": random.choice((1, 2, "auto"))}
    if random.random() < 0.25:
        perplexity = {"text": {"files": [TEXT]}, "window": random.choice((7, 16)), "dense": random.random() < 0.5}
        document["evaluation"] = {"perplexity": perplexity}
    return document


def at_full_rank(document: Entry, width: int) -> Entry:
    """The same job where nothing is cut off, and nothing rounded.

    What no token uses costs no loss, and is cut at keep: 1 where ranks follow it: of `loss_aware`, which knows no other
    ranks, the text has some tokens for each of the `width` numbers that a projection reads at most.
    """
    sizes = ("ranks", "keep", "cache_keep", "skip_above", "allocation")
    entries = []
    for entry in document["methods"]:
        kept = {key: value for key, value in entry.items() if key not in sizes}
        entries.append(kept | {"cache_keep" if entry["method"] == "lorc" else "keep": 1.0})
    left_out = ("budget", "quantize", "evaluation")
    kept_blocks = {key: value for key, value in document.items() if key not in left_out}
    if any(entry["method"] == "loss_aware" for entry in entries):
        calibration = {key: value for key, value in document["calibration"].items() if key != "gradient"}
        enough = math.ceil(TOKENS_PER_NUMBER * width / calibration["sequence_length"])
        kept_blocks["calibration"] = calibration | {"samples": enough, "micro_batch": 8}
    return kept_blocks | {"methods": entries, "output": "full", "run_dir": "full.run"}


def _calibration(random: Random, positions: int) -> Entry:
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


def _budget(random: Random) -> Entry:
    kind = random.choice(("keep", "keep", "keep", "bytes", "bytes", "max_loss"))
    budget: Entry = {kind: round(random.uniform(random.choice((0.05, 0.5, 0.5)), 1.0), 2)}
    if random.random() < 0.3:
        budget["scope"] = random.choice(("decoder", "model"))
    if random.random() < 0.25:
        budget["multiple"] = random.choice((1, 2, 4, 8, 16))
    return budget


def _quantize(random: Random) -> Entry:
    quantize: Entry = {"bits": random.choice((8, 4, 3, "auto"))}
    if random.random() < 0.6:
        quantize["group"] = random.choice((32, 32, 64, 128, None))
    if random.random() < 0.4:
        quantize["what"] = random.choice(("factors", "all"))
    if random.random() < 0.25:
        roles = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")
        quantize["skip"] = random.sample(roles, random.randint(1, 3))
    if random.random() < 0.3:
        quantize["feedback"] = random.random() < 0.5
    return quantize


def _entry(random: Random, layers: int) -> Entry:
    name = random.choice(tuple(OPTIONS))
    entry: Entry = {"method": name, **OPTIONS[name](random)}
    if random.random() < 0.2:
        some = sorted(random.sample(range(layers), random.randint(1, layers)))
        entry["layers"] = random.choice(("all", "last:1", "last:0.5", some))
    if random.random() < 0.35 and not {"ranks", "cache_keep"} & {*entry}:
        entry["keep"] = random.choice((1.0, 0.95, 0.9, 0.7, 0.5, 0.3, 0.1))
    if random.random() < 0.1:
        entry["rank_multiple"] = random.choice((1, 2, 4))
    return entry


def _some(random: Random, share: float = 0.35, **choices: tuple[Any, ...]) -> Entry:
    """Each option by chance, with one of its values."""
    return {name: random.choice(values) for name, values in choices.items() if random.random() < share}


def _flat_llm(random: Random) -> Entry:
    entry = _some(
        random,
        attention=(True, False),
        mlp=(True, False),
        allocation=("importance", "uniform", "loss"),
        basis=("value", "context"),
        weighting=("none", "output", "loss"),
        selection=("leverage", "eliminate"),
        query_key=("none", "head_pca"),
        ridge=(0.01, 1.0),
    )
    if random.random() < 0.15:
        entry["uniform"] = True
    elif random.random() < 0.2:
        sizes = {"value": random.randint(1, 16), "mlp": random.randint(1, 80), "query_key": random.choice((2, 4, 6))}
        entry["ranks"] = {name: sizes[name] for name in random.sample(tuple(sizes), random.randint(1, 2))}
    return entry


def _lorc(random: Random) -> Entry:
    entry = _some(
        random,
        key=(True, False),
        value=(True, False),
        allocation=("progressive", "uniform", "loss"),
        weighting=("none", "input", "loss"),
    )
    if random.random() < 0.5:
        entry["cache_keep"] = random.choice((0.2, 0.5, 0.8, 1.0))
    return entry


def _joint(random: Random) -> Entry:
    entry = _some(
        random,
        query_key=("joint", "separate", "joint_per_head", "none"),
        mlp=(True, False, "joint", "separate", "none"),
        allocation=("uniform", "loss"),
        weighting=("none", "input", "loss"),
    )
    if random.random() < 0.2:
        entry["ranks"] = random.choice(({"query_key": random.randint(1, 40)}, {"mlp": random.randint(1, 40)}))
    return entry


def _lestd(random: Random) -> Entry:
    entry = _some(
        random,
        target=("attention", "mlp", "both"),
        prune=(True, False),
        weighting=("none", "input"),
        sweeps=(1, 3),
        allocation=("uniform", "loss"),
        threshold=("layer", "model"),
        refine_sweeps=(0, 2),
        core=("dense", "csr"),
    )
    if random.random() < 0.25:
        entry["ranks"] = [random.randint(1, 24), random.randint(1, 8), random.randint(1, 4)]
    return entry


def _loss_aware(random: Random) -> Entry:
    return _some(
        random,
        query_key=(True, False),
        attention=(True, False),
        mlp=(True, False),
        factors=("pivoted", "plain"),
        correct=("none", "output"),
        weighting=("loss", "input"),
        widths=(1, 4),
    )


OPTIONS: dict[str, Callable[[Random], Entry]] = {
    "flat_llm": _flat_llm,
    "lorc": _lorc,
    "joint_rank_k": _joint,
    "lestd": _lestd,
    "loss_aware": _loss_aware,
    "svd": lambda random: {},
    "asvd": lambda random: _some(random, alpha=(0.0, 0.5, 2.0)),
    "svd_llm": lambda random: {},
    "magnitude": lambda random: {},
}
TOGETHER: tuple[Callable[[Random], list[Entry]], ...] = (
    lambda random: [_flat_llm(random) | {"method": "flat_llm", "attention": False, "mlp": True}, _of_attention(random)],
    lambda random: [{"method": "magnitude"}, _of_attention(random)],
    lambda random: [{"method": "flat_llm", "attention": True, "mlp": False}, {"method": "lestd", "target": "mlp"}],
    lambda random: [{"method": "flat_llm"}, {"method": "joint_rank_k", "mlp": False}],
    lambda random: [{"method": "flat_llm"}, {"method": "lorc", "value": False, "cache_keep": 0.5}],
    lambda random: [{"method": "magnitude", "keep": 0.8}, {"method": "lorc"}],
)
BY_LOSS: tuple[Callable[[Random], Entry], ...] = (
    lambda random: {"method": "loss_aware", **_loss_aware(random)},
    lambda random: {"method": "flat_llm", "allocation": "loss"},
    lambda random: {"method": "lorc", "allocation": "loss"},
    lambda random: {"method": "lestd", "target": random.choice(("attention", "mlp")), "allocation": "loss"},
)


def _of_attention(random: Random) -> Entry:
    """An entry that leaves the MLP alone."""
    return random.choice(
        (
            {"method": "lorc", **_lorc(random)},
            {
                "method": "joint_rank_k",
                **_some(random, query_key=("joint", "separate", "joint_per_head")),
                "mlp": False,
            },
            {"method": "lestd", "target": "attention"},
            {"method": "loss_aware", "mlp": False},
        )
    )
