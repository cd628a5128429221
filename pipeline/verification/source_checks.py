"""What `verify --source` proves: each tensor of the source is copied or stored by a named method; the logits are near.

Legend: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from lamina.block_lamina import ATTENTION_ROLES
from manifests.records import FormSpec
from pipeline.checkpoint.compression_record import file_fault
from pipeline.checkpoint.listing import OUR_FILES
from pipeline.families.family import LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.calibration import sample_tokens
from pipeline.inputs.source_dtypes import FIELD as SOURCE_DTYPES
from pipeline.inputs.source_dtypes import unstored_dtypes
from pipeline.methods.method import served_roles
from pipeline.methods.unchanged import Unchanged
from pipeline.rounding.schemes import packed_names
from pipeline.verification.output_checks import Finding
from stores.headers import DTYPE_NAMES, DTYPES
from stores.model_files import is_copy
from stores.source import SourceCheckpoint
from stores.storage import Storage
from workers.comparing import compare_models, deviation
from workers.layers import cpu_reader

SKETCH_BOUND = 1e-3  # healthy ones repeat bit for bit on one machine
EXACT_BOUND = 1e-3  # relative error of the logits when no group cut anything off; float32 reaches 1e-5
ROUNDINGS = 4  # the same in units of the checkpoint's precision, where that is more: the factors are rounded to it
LOSSY_BOUND = 1.0  # the error of a layer that is left out, and of answering with the mean logits everywhere
WRITTEN_FIELDS = ("forms", "dtype", "architectures", "auto_map", "model_type")  # of config.json, by Lamina itself


def check_source(
    output: Storage,
    original: SourceCheckpoint,
    standard: Mapping[str, Any],
    config: Mapping[str, Any],
    compression: Mapping[str, Any],
) -> Finding:
    """The source is the one the checkpoint was made from, and config.json still describes its layers."""
    recorded = compression["source"]["files"]
    faults = []
    for name, record in recorded.items():
        if file_fault(original.storage, name, record):
            faults.append(f"{original.storage.at(name)}: not the file that the checkpoint was made from")
    standard = json.loads(json.dumps(standard))
    for field in sorted(standard.keys() - set(WRITTEN_FIELDS)):
        if config.get(field) != standard[field]:
            faults.append(f"config.json: {field} is {config.get(field)!r}, by the source {standard[field]!r}")
    dtypes = unstored_dtypes(compression["claimed"], original.tensors, compression["tensors"], config["dtype"])
    if (said := config.get(SOURCE_DTYPES) or {}) != dtypes:
        faults.append(f"config.json: {SOURCE_DTYPES} is {said!r:.200}, by the source {dtypes!r:.200}")
    for name in sorted(compression["files"].keys() - recorded.keys() - OUR_FILES):
        there = original.storage.has(name)
        if there and not is_copy(name, output.read(name), original.storage.read(name)):
            faults.append(f"{name}: differs from the source's")
    return Finding("source", f"{len(recorded)} files of the source, and the config made from it", tuple(faults))


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
        name: (layer, role)
        for layer in geometry.layers
        for role in (*layer.roles, *(outer for outer, _, _ in layer.outer))
        for name, _ in layer.tensors((role,)).values()
    }
    methods = {entry["method"] for entry in compression["manifest"]["methods"]}
    if compression["manifest"].get("quantize"):
        methods.add(Unchanged.name)
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
        described = compression["layers"][layer.index]
        form = described["forms"].get(role)
        if form is None and name not in checkpoint.tensors and packed_names(name) <= checkpoint.tensors.keys():
            faults += _packed_faults(compression, packed_names(name), claimed[name])
        elif form is None and any(role in report.get("refitted", ()) for report in described["groups"].values()):
            faults += _refitted_faults(original, compression, name, claimed[name])
        elif form is None:  # looked at and left as it was
            kept += 1
            faults += _copy_faults(original, checkpoint, compression, name, claimed[name])
        else:
            faults += _factor_faults(original, compression, name, (layer, role), described["forms"], claimed[name])
    for layer in geometry.layers:
        faults += _group_faults(original, compression, layer, compression["layers"][layer.index]["forms"])
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


def _refitted_faults(
    original: SourceCheckpoint, compression: Mapping[str, Any], name: str, method: str
) -> Iterator[str]:
    """A dense tensor with other numbers: as the source's but for them."""
    entry, record = compression["tensors"].get(name, {}), original.tensors[name]
    if (entry.get("origin"), entry.get("dtype"), entry.get("shape")) != (method, record.dtype, list(record.shape)):
        yield f"{name}: refitted by {method}, but stored as {entry or 'nothing'}; the source has {record}"


def _factor_faults(
    original: SourceCheckpoint,
    compression: Mapping[str, Any],
    name: str,
    place: tuple[LayerGeometry, str],
    forms: Mapping[str, Mapping[str, Any]],
    method: str,
) -> Iterator[str]:
    """What is stored in place of one tensor of a factored role says so, and has the dtype that follows from it: a bias
    that of the source's, a factor that of the weights that it stands for."""
    layer, role = place
    path, form = f"{layer.path(role)}.", forms[role]
    specs = {other: FormSpec(**spec) for other, spec in forms.items()}
    for stored, entry in compression["tensors"].items():
        part = stored.removeprefix(path)
        is_bias = stored == f"{path}bias" and stored in original.tensors
        if part == stored or is_bias != (name == f"{path}bias"):
            continue
        served = (layer.path(other) for other in served_roles(f"{role}.{part}", specs))
        names = [name] if is_bias else [f"{other}.weight" for other in served]
        if entry["origin"] != method or entry["form"] != form["form"]:
            yield f"{stored}: {entry['form']} by {entry['origin']}, but {name} is claimed as {form['form']} by {method}"
        else:
            yield from _dtype_faults(original, stored, entry["dtype"], names)


def _group_faults(
    original: SourceCheckpoint,
    compression: Mapping[str, Any],
    layer: LayerGeometry,
    forms: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """Tensors that belong to no role but to a group of a layer have the widest dtype of the weights of its roles."""
    specs = {role: FormSpec(**spec) for role, spec in forms.items()}
    groups: dict[tuple[str, str], tuple[str, ...]] = {}
    for role, spec in specs.items():
        key = spec.group or ("attention" if role in ATTENTION_ROLES else "mlp"), spec.form
        groups[key] = (*groups.get(key, ()), role)
    for (group, form), roles in groups.items():
        path = f"{layer.group_path(roles, group)}.{form}."
        names = [f"{layer.path(role)}.weight" for role in roles]
        for stored, entry in compression["tensors"].items():
            if stored.startswith(path):
                yield from _dtype_faults(original, stored, entry["dtype"], names)


def _dtype_faults(original: SourceCheckpoint, stored: str, stored_dtype: str, names: Sequence[str]) -> Iterator[str]:
    """`stored` is of integers, or has the widest dtype of those tensors of the source that it stands for."""
    dtype = DTYPE_NAMES[reduce(torch.promote_types, (original.tensors[each].torch_dtype for each in names))]
    if stored_dtype != dtype and DTYPES[stored_dtype].is_floating_point:
        yield f"{stored}: {stored_dtype} numbers, by the source's {' and '.join(names)} {dtype}"


def _packed_faults(compression: Mapping[str, Any], names: set[str], method: str) -> Iterator[str]:
    """A weight that is as it was but for rounding is stored by the method that claims it."""
    for name in sorted(names):
        if compression["tensors"][name]["origin"] != method:
            yield f"{name}: of {compression['tensors'][name]['origin']!r}, but claimed by {method}"


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
    """Both models on a few tokens, side by side in float32, held against what the job measured on the same ones.

    The job's figures are random projections of what each layer, alone on the source's hidden states, does, and of the
    logits: they come out again to rounding, and differ when anything in the layer does. How much a lossy job may lose
    nobody knows beforehand: the errors themselves are judged by `bound`, if there is one, and where nothing was cut
    off. A record without figures is judged on random tokens: a layer has to be better than none, and the logits better
    than their mean.
    """
    recorded = compression.get("compared")
    ids_BS = torch.tensor(recorded["tokens"]) if recorded else sample_tokens(None, config)[1]
    origin = recorded["origin"] if recorded else "random"
    layers = standard["num_hidden_layers"]
    found = compare_models(
        cpu_reader(original, standard, torch.float32),
        cpu_reader(checkpoint, config, torch.float32),
        (None,) * layers,
        ids_BS,
    ).report()
    errors, error = found["layer_errors"], found["error"]
    stated, why = (bound, "as given") if bound is not None else default_bound(config, compression)
    faults = [
        f"layer {layer}: relative error {error:.4g} of its update on the source's hidden states is above {stated:g}"
        for layer, error in enumerate(errors)
        if not error <= stated
    ]
    if not error <= stated:
        faults.append(
            f"relative error {error:.4g} of the logits is above {stated:g} ({why}); "
            "damaged, or cut off too much: if so much was meant to go, say so with --bound"
        )
    if recorded:
        faults += _differing(found, recorded)
    held = f"; as the job measured, to {SKETCH_BOUND:g}" if recorded else ""
    detail = f"relative error {error:.4g} on {ids_BS.numel()} {origin} tokens, of a layer at most {max(errors):.4g}"
    limit = f"; bound {stated:g} ({why})" if math.isfinite(stated) else ""
    return Finding("logits", f"{detail}{limit}{held}", tuple(faults))


def _differing(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    """Where the figures are not those of the job."""
    if len(found["sketch"]) != len(recorded["sketch"]):
        yield f"compression.json: figures of {len(recorded['sketch'])} layers; the model has {len(found['sketch'])}"
        return
    *layers, logits = deviation(found, recorded)
    for layer, apart in enumerate(layers):
        if not apart <= SKETCH_BOUND:
            yield (
                f"layer {layer}: does something else than when the job measured it: its figures are {apart:.4g} apart, "
                f"bound {SKETCH_BOUND:g}; error then {recorded['layer_errors'][layer]:.4g}, "
                f"now {found['layer_errors'][layer]:.4g}"
            )
    if not logits <= SKETCH_BOUND:
        yield (
            f"logits: other than when the job measured them: {logits:.4g} apart, bound {SKETCH_BOUND:g}; "
            f"error then {recorded['error']:.4g}, now {found['error']:.4g}"
        )


def default_bound(config: Mapping[str, Any], compression: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative error of the logits that passes, and how it was chosen."""
    if cut_nothing(compression):
        rounding = ROUNDINGS * torch.finfo(getattr(torch, config["dtype"])).eps
        return max(EXACT_BOUND, rounding), f"nothing was cut off; rounding of {config['dtype']}"
    if compression.get("compared"):
        return math.inf, "lossy"
    return LOSSY_BOUND, "lossy: better than no layer, and than the mean logits"


def cut_nothing(compression: Mapping[str, Any]) -> bool:
    """Whether every group kept its full rank: it is dense, or all of the errors that it reports are zero."""
    for layer in compression["layers"]:
        for report in layer["groups"].values():
            errors = [value for key, value in report.items() if "error" in key]
            if report.get("rounding_error") or (not report.get("dense") and (not errors or max(errors) > 0.0)):
                return False
    return True
