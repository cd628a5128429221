"""Checks OUTPUT against its source: a named method stores each tensor, or it is copied; outputs are close.

Legend: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from lamina.block_lamina import ATTENTION_ROLES
from lamina.mixture_lamina import ROUTER, ROUTER_BIAS
from manifests.records import FormSpec
from pipeline.checkpoint.compression_record import file_fault
from pipeline.checkpoint.listing import OUR_FILES
from pipeline.families.latent_config import described_config, latent_form, untied_head
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.calibration import sample_tokens
from pipeline.inputs.source_dtypes import FIELD as SOURCE_DTYPES
from pipeline.inputs.source_dtypes import unstored_dtypes
from pipeline.methods.method import served_roles
from pipeline.methods.unchanged import Unchanged
from pipeline.rounding.schemes import packed_names
from pipeline.verification.output_checks import Finding, recorded_forms
from stores.formats import keeps
from stores.headers import DTYPE_NAMES, DTYPES
from stores.model_files import CONFIG_FILE, is_copy
from stores.source import SourceCheckpoint
from workers.checkpoint_reader import cpu_reader
from workers.comparing import compare_models, deviation

SKETCH_BOUND = 1e-3  # intact ones repeat bit for bit on one machine
EXACT_BOUND = 1e-3  # relative error of the logits when nothing is cut off; float32 reaches 1e-5
ROUNDINGS = 4  # the same in units of rounding of the checkpoint's dtype, to which the factors are rounded
LOSSY_BOUND = 1.0  # the error of leaving a layer out, and of predicting the mean logits everywhere
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)  # of config.json; compressing keeps them
WRITTEN_FIELDS = ("forms", "dtype", "architectures", "auto_map", "model_type")  # of config.json, by Lamina itself


@dataclass(frozen=True)
class SourceAndOutput:
    """A source and the OUTPUT that is checked against it.

    Attributes:
        original, standard: the source, and its config in standard fields.
        checkpoint, config, compression: OUTPUT, its config.json and its compression record.
    """

    original: SourceCheckpoint
    standard: Mapping[str, Any]
    checkpoint: SourceCheckpoint
    config: Mapping[str, Any]
    compression: Mapping[str, Any]

    def entry(self, name: str) -> Mapping[str, Any]:
        """Return the record of a stored tensor; empty if it has none."""
        entry: Mapping[str, Any] = self.compression["tensors"].get(name, {})
        return entry


def other_model(
    original: SourceCheckpoint, standard: Mapping[str, Any], config: Mapping[str, Any], compression: Mapping[str, Any]
) -> str | None:
    """Return the fault of a source that is another model than the one that OUTPUT was compressed from; None if its
    config.json is the recorded one, or has the same sizes. Arguments: as of SourceAndOutput."""
    recorded = compression["source"]
    record = recorded["files"].get(CONFIG_FILE)
    if record is None or not file_fault(original.storage, CONFIG_FILE, record):
        return None
    sizes = [(field, standard.get(field), config.get(field)) for field in SIZES]
    differing = [f"{field} is {theirs}, not {ours}" for field, theirs, ours in sizes if ours and theirs != ours]
    if not differing:
        return None
    return (
        f"{original.storage.at()}: another model ({'; '.join(differing)}); give the one that the checkpoint was made "
        f"from, {recorded['path']}"
    )


def check_source(pair: SourceAndOutput) -> Finding:
    """Check that OUTPUT was compressed from this source, and that config.json describes its layers."""
    original, config, compression = pair.original, pair.config, pair.compression
    recorded = compression["source"]["files"]
    faults = [
        f"{original.storage.at(name)}: not the file that the checkpoint was made from"
        for name, record in recorded.items()
        if file_fault(original.storage, name, record)
    ]
    forms = recorded_forms(compression)
    standard = json.loads(json.dumps(described_config(pair.standard, forms) if latent_form(forms) else pair.standard))
    for field in sorted(standard.keys() - set(WRITTEN_FIELDS)):
        if config.get(field) != standard[field]:
            faults.append(f"config.json: {field} is {config.get(field)!r}, by the source {standard[field]!r}")
    expected = unstored_dtypes(compression["claimed"], original.tensors, compression["tensors"], config["dtype"])
    expected = {} if latent_form(forms) else expected
    if (dtypes := config.get(SOURCE_DTYPES) or {}) != expected:
        faults.append(f"config.json: {SOURCE_DTYPES} is {dtypes!r:.200}, by the source {expected!r:.200}")
    for name in sorted(compression["files"].keys() - recorded.keys() - OUR_FILES):
        in_source = original.storage.has(name)
        if in_source and not is_copy(name, pair.checkpoint.storage.read(name), original.storage.read(name)):
            faults.append(f"{name}: differs from the source's")
    return Finding("source", f"{len(recorded)} files of the source, and the config made from it", tuple(faults))


def check_coverage(pair: SourceAndOutput) -> Finding:
    """Check that each source tensor is copied bit for bit, or is of a role that a method of the manifest stores.

    `check_forms` checks that the tensors of factored roles are complete and have the shapes of their forms.
    """
    geometry, compression = geometry_of(pair.standard), pair.compression
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
    copied = unchanged = 0
    for name in pair.original.tensors:
        if name not in claimed:
            copied += 1
            faults += _copy_faults(pair, name, "copied")
            continue
        if name not in roles or claimed[name] not in methods:
            faults.append(f"{name}: claimed by {claimed[name]!r}, which is not a method of the manifest that could")
            continue
        layer, role = roles[name]
        described = compression["layers"][layer.index]
        if ROUTER in described["forms"] and role in {*layer.routed_roles, ROUTER, ROUTER_BIAS}:
            faults += _expert_faults(pair, name, role, described["forms"][ROUTER]["rank"], claimed[name])
        elif role in described["forms"]:
            faults += _factor_faults(pair, name, layer, role, described["forms"], claimed[name])
        elif name not in pair.checkpoint.tensors and packed_names(name) <= pair.checkpoint.tensors.keys():
            faults += _packed_faults(pair, packed_names(name, pair.checkpoint.tensors), claimed[name])
        elif any(role in report.get("refitted", ()) for report in described["groups"].values()):
            faults += _refitted_faults(pair, name, claimed[name])
        else:
            unchanged += 1
            faults += _copy_faults(pair, name, claimed[name])
    for layer in geometry.layers:
        faults += _group_faults(pair, layer, compression["layers"][layer.index]["forms"])
    faults += [f"{name}: claimed by {claimed[name]}, but no tensor of the source" for name in claimed - roles.keys()]
    head = untied_head(pair.standard, latent_form(recorded_forms(compression)) is not None)
    faults += _stray_faults(pair, methods, head)
    claimants = ", ".join(sorted(set(claimed.values()))) or "nobody"
    detail = f"{copied} of {len(pair.original.tensors)} source tensors copied, {len(claimed)} stored by {claimants}"
    return Finding("coverage", f"{detail}, {unchanged} of these unchanged", tuple(faults))


def _copy_faults(pair: SourceAndOutput, name: str, origin: str) -> Iterator[str]:
    """Check that a tensor equals the source's bit for bit, or, if it was healed, has its dtype and shape."""
    weight = pair.original.tensors[name]
    if pair.compression.get("healed") and pair.entry(name).get("healed"):
        if not name.startswith(tuple(layer.prefix for layer in geometry_of(pair.standard).layers)):
            yield f"{name}: recorded as healed, but of no decoder layer"
        yield from _refitted_faults(pair, name, origin)
        return
    if weight.parts and not keeps(weight):
        yield from _decoded_faults(pair, name, origin)
        return
    for source in weight.stored:
        copy = pair.checkpoint.stored.get(source.name)
        if copy is None or pair.entry(source.name).get("origin") != origin:
            yield f"{source.name}: neither copied nor claimed by a method"
            continue
        pieces = zip(pair.original.copy_bytes(source.name), pair.checkpoint.copy_bytes(source.name), strict=False)
        if (source.dtype, source.shape) != (copy.dtype, copy.shape) or any(ours != theirs for ours, theirs in pieces):
            yield f"{copy.file}: {source.name}: should be the source's bit for bit, but differs"


def _decoded_faults(pair: SourceAndOutput, name: str, origin: str) -> Iterator[str]:
    """Check that a weight whose stored format is not kept equals the source's decoded weight."""
    if name not in pair.checkpoint.tensors or pair.entry(name).get("origin") != origin:
        yield f"{name}: neither copied nor claimed by a method"
    elif not torch.equal(pair.original.read([name])[name], pair.checkpoint.read([name])[name]):
        yield f"{name}: should be the source's, decoded, but differs"


def _expert_faults(pair: SourceAndOutput, name: str, role: str, stays: int, method: str) -> Iterator[str]:
    """Check a tensor of a layer that stores the first `stays` experts, under new numbers.

    `check_forms` checks their shapes.
    """
    block, tensors = role.rpartition(".")[0], pair.checkpoint.tensors
    packed = packed_names(name, tensors)
    if block and int(block.rpartition(".")[2]) >= stays:
        if not {name, *packed}.isdisjoint(tensors):
            yield f"{name}: {method} keeps {stays} experts of this layer, but it is stored"
        return
    if name not in tensors and packed <= tensors.keys():
        yield from _packed_faults(pair, packed, method)
        for part in sorted(packed):
            yield from _dtype_faults(pair, part, [name])
        return
    entry, record = pair.entry(name), pair.original.tensors[name]
    if (entry.get("origin"), entry.get("dtype")) != (method, record.dtype):
        yield f"{name}: stored by {method} as {entry or 'nothing'}; the source has {record.dtype}"


def _refitted_faults(pair: SourceAndOutput, name: str, method: str) -> Iterator[str]:
    """Check that a dense tensor with new numbers has the source's dtype and shape."""
    entry, record = pair.entry(name), pair.original.tensors[name]
    if (entry.get("origin"), entry.get("dtype"), entry.get("shape")) != (method, record.dtype, list(record.shape)):
        expected = f"{record.dtype} {list(record.shape)}"
        yield f"{name}: refitted by {method}, but stored as {entry or 'nothing'}; the source has {expected}"


def _factor_faults(
    pair: SourceAndOutput,
    name: str,
    layer: LayerGeometry,
    role: str,
    forms: Mapping[str, Mapping[str, Any]],
    method: str,
) -> Iterator[str]:
    """Check form, method and dtype of the tensors that replace a source tensor of a factored role.

    A bias has the dtype of the source's, a factor that of the weights that it serves.
    """
    path, form = f"{layer.path(role)}.", forms[role]
    specs = {other: FormSpec(**spec) for other, spec in forms.items()}
    for stored, entry in pair.compression["tensors"].items():
        part = stored.removeprefix(path)
        is_bias = stored == f"{path}bias" and stored in pair.original.tensors
        if part == stored or is_bias != (name == f"{path}bias"):
            continue
        served = (layer.path(other) for other in served_roles(f"{role}.{part}", specs))
        names = [name] if is_bias else [f"{other}.weight" for other in served]
        if entry["origin"] != method or entry["form"] != form["form"]:
            yield f"{stored}: {entry['form']} by {entry['origin']}, but {name} is claimed as {form['form']} by {method}"
        else:
            yield from _dtype_faults(pair, stored, names)


def _group_faults(pair: SourceAndOutput, layer: LayerGeometry, forms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Check that tensors of a group, rather than a role, have the widest dtype of the weights of its roles."""
    groups: dict[tuple[str, str], tuple[str, ...]] = {}
    for role, form in forms.items():
        if role == ROUTER:
            continue  # its form only counts the experts that stay
        spec = FormSpec(**form)
        key = spec.group or ("attention" if role in ATTENTION_ROLES else "mlp"), spec.form
        groups[key] = (*groups.get(key, ()), role)
    for (group, form_name), roles in groups.items():
        path = f"{layer.group_path(roles, group)}.{form_name}."
        names = [f"{layer.path(role)}.weight" for role in roles]
        for stored in pair.compression["tensors"]:
            if stored.startswith(path):
                yield from _dtype_faults(pair, stored, names)


def _dtype_faults(pair: SourceAndOutput, stored: str, names: Sequence[str]) -> Iterator[str]:
    """Check that a tensor holds integers, or has the widest dtype of the source tensors that it replaces."""
    dtype = DTYPE_NAMES[reduce(torch.promote_types, (pair.original.tensors[name].torch_dtype for name in names))]
    stored_dtype = pair.entry(stored)["dtype"]
    if stored_dtype != dtype and DTYPES[stored_dtype].is_floating_point:
        yield f"{stored}: {stored_dtype} numbers, by the source's {' and '.join(names)} {dtype}"


def _packed_faults(pair: SourceAndOutput, names: set[str], method: str) -> Iterator[str]:
    """Check that a weight that is only rounded is stored by the method that claims it."""
    for name in sorted(names):
        if (origin := pair.entry(name)["origin"]) != method:
            yield f"{name}: of {origin!r}, but claimed by {method}"


def _stray_faults(pair: SourceAndOutput, methods: set[str], head: Mapping[str, str]) -> Iterator[str]:
    """Check that each stored tensor comes from the source or from a method of the manifest, and an untied head too."""
    for name, entry in pair.compression["tensors"].items():
        if name in head:
            if not torch.equal(pair.original.read([head[name]])[head[name]], pair.checkpoint.read([name])[name]):
                yield f"{name}: should be {head[name]} bit for bit, but differs"
        elif entry["origin"] == "copied" and name not in pair.original.tensors and name not in pair.original.stored:
            yield f"{name}: recorded as copied, but the source has no such tensor"
        elif entry["origin"] != "copied" and entry["origin"] not in methods:
            yield f"{name}: of {entry['origin']!r}, which is not a method of the manifest"


def check_logits(pair: SourceAndOutput, bound: float | None) -> Finding:
    """Run both models on a few tokens in float32, and compare them with each other and with the job's figures.

    The job's figures are random projections of each layer's update, on the source's hidden states, and of the logits.
    They repeat up to rounding, and change with any number of the layer. The errors themselves must not exceed `bound`.
    If it is None, the bound is one of rounding where nothing was truncated, and a lossy job has none, as its loss is
    unknown beforehand. Without recorded figures, random tokens are used: a layer must be better than leaving it out,
    and the logits better than their mean.
    """
    recorded = pair.compression.get("compared")
    if recorded:
        ids_BS = torch.tensor(recorded["tokens"])
    else:
        _, ids_BS = sample_tokens(None, pair.config, pair.original.storage)
    origin = recorded["origin"] if recorded else "random"
    measured = compare_models(
        cpu_reader(pair.original, pair.standard, torch.float32),
        cpu_reader(pair.checkpoint, pair.config, torch.float32),
        (None,) * pair.standard["num_hidden_layers"],
        ids_BS,
    ).report()
    errors, error = measured["layer_errors"], measured["error"]
    stated, why = (bound, "as given") if bound is not None else default_bound(pair.config, pair.compression)
    faults = [
        f"layer {layer}: relative error {error:.4g} of its update on the source's hidden states is above {stated:g}"
        for layer, error in enumerate(errors)
        if not error <= stated
    ]
    if not error <= stated:
        faults.append(
            f"relative error {error:.4g} of the logits is above {stated:g} ({why}); "
            "damaged, or truncated too much: if that was intended, give a larger --bound"
        )
    if recorded:
        faults += _deviations(measured, recorded)
    repeated = f"; as the job measured, to {SKETCH_BOUND:g}" if recorded else ""
    detail = f"relative error {error:.4g} on {ids_BS.numel()} {origin} tokens, of a layer at most {max(errors):.4g}"
    limit = f"; bound {stated:g} ({why})" if math.isfinite(stated) else ""
    return Finding("logits", f"{detail}{limit}{repeated}", tuple(faults))


def _deviations(measured: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield the layers, and the logits, whose figures differ from the job's."""
    if len(measured["sketch"]) != len(recorded["sketch"]):
        yield f"compression.json: figures of {len(recorded['sketch'])} layers; the model has {len(measured['sketch'])}"
        return
    *layers, logits = deviation(measured, recorded)
    for layer, apart in enumerate(layers):
        if not apart <= SKETCH_BOUND:
            yield (
                f"layer {layer}: computes other outputs than the job measured: they differ by {apart:.4g}, bound "
                f"{SKETCH_BOUND:g}; error then {recorded['layer_errors'][layer]:.4g}, "
                f"now {measured['layer_errors'][layer]:.4g}"
            )
    if not logits <= SKETCH_BOUND:
        yield (
            f"logits: differ from those that the job measured by {logits:.4g}, bound {SKETCH_BOUND:g}; "
            f"error then {recorded['error']:.4g}, now {measured['error']:.4g}"
        )


def default_bound(config: Mapping[str, Any], compression: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest relative error of the logits that passes, and the reason for it."""
    if cut_nothing(compression):
        rounding = ROUNDINGS * torch.finfo(getattr(torch, config["dtype"])).eps
        return max(EXACT_BOUND, rounding), f"nothing was truncated; rounding of {config['dtype']}"
    if compression.get("compared"):
        return math.inf, "lossy"
    return LOSSY_BOUND, "lossy: better than leaving a layer out, and than the mean logits"


def cut_nothing(compression: Mapping[str, Any]) -> bool:
    """True if every group kept its full rank: it is dense, or all of its reported errors are zero."""
    for layer in compression["layers"]:
        for report in layer["groups"].values():
            errors = [value for key, value in report.items() if "error" in key]
            if report.get("rounding_error") or (not report.get("dense") and (not errors or max(errors) > 0.0)):
                return False
    return True
