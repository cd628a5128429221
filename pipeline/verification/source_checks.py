"""What `verify --source` proves: each tensor of the source is copied or stored by a named method; the logits are near.

Legend: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lamina import MODELLING_FILES
from pipeline.checkpoint.assembling import CARD_FILE, TOKENIZER_FILE, without_code
from pipeline.checkpoint.compression_record import describe_bytes
from pipeline.families.registry import geometry_of
from pipeline.verification.output_checks import Finding
from stores.durable import sha256_file
from stores.source import SourceCheckpoint
from workers.config import WorkerConfig
from workers.embedding_and_head import embedding, head
from workers.layers import LayerReader

SAMPLE_SHAPE = (2, 64)  # token ids of the logits check
EXACT_BOUND = 1e-3  # relative error of the logits when no group cut anything off; float32 reaches 1e-5
ROUNDINGS = 4  # the same in units of the checkpoint's precision, where that is more: the factors are rounded to it
LOSSY_BOUND = 1.0  # the error of a layer that is left out, and of answering with the mean logits everywhere
WRITTEN_FIELDS = ("forms", "dtype", "architectures", "auto_map", "model_type")  # of config.json, by Lamina itself


def check_source(
    original: SourceCheckpoint,
    standard: Mapping[str, Any],
    config: Mapping[str, Any],
    compression: Mapping[str, Any],
) -> Finding:
    """The source is the one the checkpoint was made from, and config.json still describes its layers."""
    recorded = compression["source"]["files"]
    faults = []
    for name, record in recorded.items():
        path = original.directory / name
        if not path.is_file() or path.stat().st_size != record["size"] or sha256_file(path) != record["sha256"]:
            faults.append(f"{path}: not the file that the checkpoint was made from")
    standard = json.loads(json.dumps(standard))
    for field in sorted(standard.keys() - set(WRITTEN_FIELDS)):
        if config.get(field) != standard[field]:
            faults.append(f"config.json: {field} is {config.get(field)!r}, by the source {standard[field]!r}")
    for name in sorted(compression["files"].keys() - recorded.keys() - {CARD_FILE, *MODELLING_FILES}):
        path = original.directory / name
        if path.is_file() and compression["files"][name]["sha256"] not in _copies(path):
            faults.append(f"{name}: differs from the source's")
    return Finding("source", f"{len(recorded)} files of the source, and the config made from it", tuple(faults))


def _copies(path: Path) -> list[str]:
    """Digests of what may have become of a file that travels with the weights."""
    if path.name != TOKENIZER_FILE:
        return [sha256_file(path)]
    content = path.read_bytes()
    return [describe_bytes(copied)["sha256"] for copied in (content, without_code(content))]


def check_coverage(
    original: SourceCheckpoint,
    standard: Mapping[str, Any],
    checkpoint: SourceCheckpoint,
    compression: Mapping[str, Any],
) -> Finding:
    """Each source tensor is copied bit for bit, or one of a role that a method of the manifest stores.

    That the tensors of a factored role are all there, with the shapes of its form and ranks, is `check_forms`.
    """
    geometry = geometry_of(standard)
    roles = {
        name: (layer, key.partition(".")[0])
        for layer in range(geometry.num_layers)
        for key, (name, _) in geometry.layer_tensors(layer).items()
    }
    methods = {entry["method"] for entry in compression["manifest"]["methods"]}
    claimed = compression["claimed"]
    faults: list[str] = []
    copied = kept = 0
    for name in original.tensors:
        if name not in claimed:
            copied += 1
            faults += _copy_faults(original, checkpoint, compression, name, "copied")
            continue
        if name not in roles or claimed[name] not in methods:
            faults.append(f"{name}: claimed by {claimed[name]!r}, which is no method of the manifest that could")
            continue
        layer, role = roles[name]
        form = compression["layers"][layer]["forms"].get(role)
        if form is None:  # looked at and left as it was
            kept += 1
            faults += _copy_faults(original, checkpoint, compression, name, claimed[name])
        else:
            faults += _factor_faults(original, compression, name, f"{geometry.path(layer, role)}.", form, claimed[name])
    faults += [f"{name}: claimed by {claimed[name]}, but no tensor of the source" for name in claimed - roles.keys()]
    faults += _stray_faults(original, compression, methods)
    named = ", ".join(sorted(set(claimed.values()))) or "nobody"
    detail = f"{copied} of {len(original.tensors)} source tensors copied, {len(claimed)} stored by {named}"
    return Finding("coverage", f"{detail}, {kept} of these as they were", tuple(faults))


def _copy_faults(
    original: SourceCheckpoint, checkpoint: SourceCheckpoint, compression: Mapping[str, Any], name: str, origin: str
) -> Iterator[str]:
    entry, record, found = compression["tensors"].get(name, {}), original.tensors[name], checkpoint.tensors.get(name)
    if found is None or entry.get("origin") != origin:
        yield f"{name}: neither copied nor claimed by a method"
        return
    pieces = zip(original.copy_bytes(name), checkpoint.copy_bytes(name), strict=False)
    if (record.dtype, record.shape) != (found.dtype, found.shape) or any(ours != theirs for ours, theirs in pieces):
        yield f"{found.file}: {name}: should be the source's bit for bit, but differs"


def _factor_faults(
    original: SourceCheckpoint,
    compression: Mapping[str, Any],
    name: str,
    path: str,
    form: Mapping[str, Any],
    method: str,
) -> Iterator[str]:
    """What is stored below a factored role's path says so, and has the dtype that the source has there."""
    for stored, entry in compression["tensors"].items():
        if not stored.startswith(path):
            continue
        if entry["origin"] != method or entry["form"] != form["form"]:
            yield f"{stored}: {entry['form']} by {entry['origin']}, but {name} is claimed as {form['form']} by {method}"
        elif entry["dtype"] != original.tensors[name].dtype and entry["dtype"] != "U8":
            yield f"{stored}: {entry['dtype']} numbers, the source's {name} has {original.tensors[name].dtype}"


def _stray_faults(original: SourceCheckpoint, compression: Mapping[str, Any], methods: set[str]) -> Iterator[str]:
    for name, entry in compression["tensors"].items():
        if entry["origin"] == "copied" and name not in original.tensors:
            yield f"{name}: said to be copied, but the source has no such tensor"
        elif entry["origin"] != "copied" and entry["origin"] not in methods:
            yield f"{name}: of {entry['origin']!r}, which is no method of the manifest"


def check_logits(
    original: SourceCheckpoint,
    standard: Mapping[str, Any],
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    compression: Mapping[str, Any],
    bound: float | None,
) -> Finding:
    """Both models on fixed random tokens, side by side in float32: the error of each layer, and of the logits.

    A layer's error is that of its update on the source's hidden states, so that it is known which layer is wrong. The
    bounds are tight where no group cut anything off. What a lossy job may do nobody knows beforehand: there a layer has
    to be better than none, and the logits better than their mean. `bound` takes the place of both.
    """
    generator = torch.Generator().manual_seed(0)
    batch, length = SAMPLE_SHAPE
    length = min(length, config["max_position_embeddings"])
    ids_BS = torch.randint(0, config["vocab_size"], (batch, length), generator=generator)
    streamed = stream_both(original, standard, checkpoint, config, ids_BS)
    stated, why = (bound, "as given") if bound is not None else default_bound(config, compression)
    faults = [
        f"layer {layer}: relative error {error:.4g} of its update on the source's hidden states is above {stated:g}"
        for layer, error in enumerate(streamed.layer_errors)
        if not error <= stated
    ]
    if not streamed.error <= stated:
        faults.append(
            f"relative error {streamed.error:.4g} of the logits is above {stated:g} ({why}); "
            "damaged, or cut off too much: if so much was meant to go, say so with --bound"
        )
    worst = max(streamed.layer_errors)
    detail = f"relative error {streamed.error:.4g} on {ids_BS.numel()} tokens, of a layer at most {worst:.4g}"
    return Finding("logits", f"{detail}; bound {stated:g} ({why})", tuple(faults))


def default_bound(config: Mapping[str, Any], compression: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative error of the logits that passes, and how it was chosen."""
    if cut_nothing(compression):
        rounding = ROUNDINGS * torch.finfo(getattr(torch, config["dtype"])).eps
        return max(EXACT_BOUND, rounding), f"nothing was cut off; rounding of {config['dtype']}"
    return LOSSY_BOUND, "lossy: better than no layer, and than the mean logits"


def cut_nothing(compression: Mapping[str, Any]) -> bool:
    """Whether every group kept its full rank: it is dense, or all of the errors that it reports are zero."""
    for layer in compression["layers"]:
        for report in layer["groups"].values():
            errors = [value for key, value in report.items() if "error" in key]
            if not report.get("dense") and (not errors or max(errors) > 0.0):
                return False
    return True


@dataclass(frozen=True)
class Streamed:
    """Relative errors of the compressed model: of its logits, and of each layer's update."""

    error: float
    layer_errors: tuple[float, ...]


@torch.inference_mode()
def stream_both(
    original: SourceCheckpoint,
    standard: Mapping[str, Any],
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    ids_BS: Tensor,
) -> Streamed:
    """Both models side by side, a layer of each in memory (two while the next is read)."""
    dense, packed = _reader(original, standard), _reader(checkpoint, config)
    dense_BSD, packed_BSD = embedding(dense)(ids_BS), embedding(packed)(ids_BS)
    errors = []
    for layer in range(dense.setup.geometry.num_layers):
        ahead = layer + 1 if layer + 1 < dense.setup.geometry.num_layers else None
        for reader in (dense, packed):
            reader.read_ahead(ahead)
        after_BSD, alone_BSD = dense.block(layer, None).run(dense_BSD), packed.block(layer, None).run(dense_BSD)
        packed_BSD = cast(Tensor, packed.block(layer, None).run(packed_BSD))
        assert after_BSD is not None
        assert alone_BSD is not None
        errors.append(_relative(alone_BSD - after_BSD, after_BSD - dense_BSD))
        dense_BSD = after_BSD
    logits, found = head(dense)(dense_BSD.flatten(0, 1)), head(packed)(packed_BSD.flatten(0, 1))
    return Streamed(_relative(found - logits, logits - logits.mean(dim=0)), tuple(errors))


def _relative(error: Tensor, whole: Tensor) -> float:
    """Ratio of two norms; 0 for no error, also of nothing."""
    lost = error.double().norm().item()
    return lost / max(whole.double().norm().item(), 1e-150) if lost != 0.0 else 0.0


def _reader(source: SourceCheckpoint, config: Mapping[str, Any]) -> LayerReader:
    setup = WorkerConfig(
        source=source,
        config=config,
        geometry=geometry_of(config),
        run_dir=source.directory,
        tokens=None,
        shards=1,
        micro_batch=1,
        dtype=torch.float32,
        threads=torch.get_num_threads(),
        use_gpu=False,
        hidden_bytes=0,
    )
    return LayerReader(setup, torch.device("cpu"))
