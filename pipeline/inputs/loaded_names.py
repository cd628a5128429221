"""Matches names of a source's tensors with the family's names as transformers does, by its own table of renamings.

A stored name and a name of the family belong together if transformers loads both into the same parameter of its class.
A stored tensor that is such a parameter may hold several tensors of the family, such as all experts of a layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from manifests.errors import InputError
from manifests.parts import Fused, Shape, names_of, stacked
from pipeline.families.registry import transformers_config
from pipeline.families.wrapper import architecture, is_wrapper, wrapper_config

MERGED = (MergeModulelist, 0)
LAYOUTS = ([MERGED], [MERGED, (Concatenate, 1)], [(Concatenate, 0)])  # of parameters whose parts are byte ranges


class Place(NamedTuple):
    """A parameter of the class in transformers, and the pattern of the table by which a tensor becomes a part of it.

    `pattern`: None if the tensor is the whole parameter.
    """

    parameter: str
    pattern: str | None


class LoadedNames(NamedTuple):
    """The family's names of tensors: stored name -> name, and stored tensor -> the tensors of the family in it."""

    names: dict[str, str]
    fused: dict[str, Fused]


class Loading:
    """The renamings of transformers for the class of a model."""

    def __init__(self, model: Any) -> None:
        table = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        self.parameters = model.state_dict()
        self.prefix = model.base_model_prefix
        self.tied = model.all_tied_weights_keys

    def place(self, name: str) -> Place | None:
        """Return where a tensor of this name is loaded; None if nowhere."""
        place = Place(*rename_source_key(name, self.renamings, self.converters, self.prefix, self.parameters))
        if place.parameter not in self.parameters and name in self.parameters:
            place = Place(*rename_source_key(name, [], [], self.prefix, self.parameters))
        return place if place.parameter in self.parameters else None

    def by_place(self, names: Iterable[str]) -> dict[Place, list[str]]:
        """Group names by their places, each group in the order in which transformers loads it."""
        groups: dict[Place, list[str]] = {}
        for name in sorted(names, key=dot_natural_key):
            if place := self.place(name):
                groups.setdefault(place, []).append(name)
        return groups

    def is_tied(self, name: str) -> bool:
        """Return True if transformers loads this tensor also in place of a missing one that it repeats."""
        place = self.place(name)
        return place is not None and place.parameter in self.tied

    def converter(self, pattern: str) -> WeightConverter:
        """Return the converter of a pattern."""
        return next(converter for converter in self.converters if pattern in converter.source_patterns)


def built_on_meta(config: Mapping[str, Any]) -> Any:
    """Build transformers' own model of a source's config.json on the meta device. Raises InputError."""
    whole = wrapper_config(config) if is_wrapper(config) else transformers_config(config)
    try:
        with torch.device("meta"):
            if is_wrapper(config):
                return getattr(transformers, architecture(config["model_type"]))(whole)
            return transformers.AutoModelForCausalLM.from_config(whole)
    except Exception as error:  # transformers hardly checks values before it uses them
        raise InputError(f"config.json: transformers builds no model of it: {type(error).__name__}: {error}") from error


def loaded_names(
    config: Mapping[str, Any],
    standard: Mapping[str, Any],
    stored: Iterable[str],
    expected: Mapping[str, Shape],
    fused: Mapping[str, Fused],
) -> LoadedNames:
    """Return the family's names of stored tensors that have other names; nothing where all are the family's.

    Args:
        config: the source's config.json.
        standard: the standard config of it.
        stored: the names in the files.
        expected: the names and shapes of the family's tensors.
        fused: the tensors of the family's files that hold several of `expected`.

    Raises:
        InputError: a tensor is missing, and transformers builds no model of the config.
    """
    stored, embed, head = set(stored), *(f"{standard['block'][role]}.weight" for role in ("embed", "head"))
    if _is_complete(stored, expected, fused):
        return LoadedNames({}, {})
    loading, layers = Loading(built_on_meta(config)), standard["block"]["layers"]
    absent = loading.by_place({*expected, *fused, head} - stored)
    names: dict[str, str] = {}
    wholes: dict[str, Fused] = {}
    for place, others in loading.by_place(stored - {*expected, *fused, head}).items():
        own = absent.get(place, [])
        if len(own) == len(others):
            names |= zip(others, own, strict=True)
        elif len(others) == 1 and (whole := _fused(place, absent, expected, loading)):
            wholes[others[0]] = whole
    names |= _in_layers(names, stored - names.keys() - wholes.keys(), layers)
    if embed not in {*stored, *names.values()} and loading.is_tied(head):
        names |= {name: embed for name in stored if names.get(name, name) == head}
    return LoadedNames(names, wholes)


def _is_complete(stored: set[str], expected: Iterable[str], fused: Mapping[str, Fused]) -> bool:
    """Return True if each module of the family has a tensor; formats of weights name parts of a weight otherwise."""
    modules = {name.rpartition(".")[0] for name in stored}
    held = names_of(whole for name, whole in fused.items() if name in stored or name.rpartition(".")[0] in modules)
    return all(name in stored or name in held or name.rpartition(".")[0] in modules for name in expected)


def _fused(
    place: Place, absent: Mapping[Place, list[str]], shapes: Mapping[str, Shape], loading: Loading
) -> Fused | None:
    """Return the layout of a parameter that consists of tensors of the family; None if it does not, or in a way that
    has no byte ranges."""
    parts = {pattern: names for (of, pattern), names in absent.items() if of == place.parameter and pattern}
    if place.pattern or not parts or any(name not in shapes for names in parts.values() for name in names):
        return None
    converter = loading.converter(next(iter(parts)))
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if operations not in LAYOUTS:
        return None
    if {*parts} != {*converter.source_patterns} or len({len(names) for names in parts.values()}) > 1:
        return None
    groups = [*zip(*(parts[pattern] for pattern in converter.source_patterns), strict=True)]  # those of each expert
    first = [shapes[name] for name in groups[0]]
    rows, inner = sum(shape[0] for shape in first), first[0][1:]
    blocks = (
        stacked({name: shapes[name] for name in group}, at * rows * math.prod(inner)) for at, group in enumerate(groups)
    )
    by_expert = (len(groups),) if operations[0] == MERGED else ()
    return Fused((*by_expert, rows, *inner), tuple(chain.from_iterable(blocks)))


def _in_layers(names: Mapping[str, str], others: Iterable[str], layers: str) -> dict[str, str]:
    """Return names of further tensors of the layers, such as parts of weights in a stored format, where the source
    has its layers at another path than `layers`."""
    rest = {name: own.removeprefix(layers) for name, own in names.items() if own.startswith(f"{layers}.")}
    paths = {name.removesuffix(end) for name, end in rest.items() if name.endswith(end)} - {layers}
    return {name: layers + name.removeprefix(path) for path in paths for name in others if name.startswith(f"{path}.")}


def foreign_prefix(stored: Iterable[str], layers: str) -> str:
    """Describe where a source has its tensors, if its layers are not at the path `layers`; otherwise empty."""
    names = [name.split(".") for name in stored]
    paths = Counter(_path_of_layers(name) for name in names)
    path = max(paths, key=lambda each: (bool(each), paths[each]), default="")
    if not path or path == layers:
        return ""
    alike = takewhile(lambda each: len({*each}) == 1, zip(*names, strict=False))
    common = ".".join(each[0] for each in alike)
    if common and path.startswith(f"{common}."):
        return f": all tensors lie under `{common}.`, which transformers does not read; remove it from their names"
    return f": the layers lie at `{path}`, where transformers does not look for them; rename them to `{layers}`"


def _path_of_layers(name: Sequence[str]) -> str:
    """Return what precedes the first number in a name; empty without a number."""
    at = next((place for place, each in enumerate(name) if each.isdecimal()), 0)
    return ".".join(name[:at])
