"""Describes a model of an unknown type: its layers, and the tensors that known families give the same names."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from lamina.block_lamina import LINEAR_ROLES, MLP_ROLES, ROWWISE_ROLES
from lamina.mixture_lamina import ROUTER
from pipeline.families.family import Family
from pipeline.families.registry import FAMILIES
from stores.source import SourceCheckpoint

TUTORIAL = "docs/tutorials/adding-a-family.md"
LAYER = re.compile(r"(?P<layers>.*?)\.(?P<index>\d+)\.(?P<inside>.+)")
PART = re.compile(r"(\.weight|\.bias|_bias|_weight)$")
EXPERT = re.compile(r"(?<=experts)\.\d+(?=\.)")
SHOWN = 8
HIDDEN = ("hidden_size", "n_embd", "d_model")  # names of the hidden size in configs
Shapes = Mapping[str, tuple[int, ...]]  # of a layer's tensors, by their names inside the layer


def describe_unknown(source: SourceCheckpoint) -> str:
    """Describe an unknown model line by line, with the tensors of its layers that have the names of a known
    family's."""
    config, (path, layers) = source.config, _layers(source)
    names = ", ".join(map(str, config.get("architectures") or ["none"]))
    numbers = sum(math.prod(record.shape) for record in source.tensors.values())
    lines = [f"architectures: {names}; {len(source.tensors):,} tensors of {numbers:,} numbers"]
    if layers:
        hidden = next((config[name] for name in HIDDEN if isinstance(config.get(name), int)), None)
        lines += [f"layers: {len(layers)}, at {path}", *_kinds(layers, hidden)]
    else:
        lines.append("layers: no tensors are numbered as layers are")
    return "\n  ".join([*lines, f"a family is an entry of a table: {TUTORIAL} adds one"])


def _layers(source: SourceCheckpoint) -> tuple[str, dict[int, Shapes]]:
    """Return the path of the longest numbered list of layers, which is the decoder, and the tensors of each layer."""
    matches = [(match, record) for name, record in source.tensors.items() if (match := LAYER.fullmatch(name))]
    sizes: Counter[str] = Counter()
    for match, record in matches:
        sizes[match["layers"]] += math.prod(record.shape)
    path = sizes.most_common(1)[0][0] if sizes else ""
    layers: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for match, record in matches:
        if match["layers"] == path:
            layers[int(match["index"])][EXPERT.sub(".E", match["inside"])] = record.shape
    return path, dict(layers)


def _kinds(layers: Mapping[int, Shapes], hidden: int | None) -> Iterator[str]:
    """Yield the lines of `_blocks` for each kind of layer. Layers of one kind have the same tensor names."""
    kinds: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    for layer in sorted(layers):
        kinds[frozenset(layers[layer])].append(layer)
    for alike in kinds.values():
        if len(kinds) > 1:
            yield f"{len(alike)} of {len(layers)} layers, as layer {alike[0]}:"
        yield from (f"{'  ' * (len(kinds) > 1)}{line}" for line in _blocks(layers[alike[0]], hidden))


def _blocks(shapes: Shapes, hidden: int | None) -> Iterator[str]:
    """Yield a line each for attention, MLP, experts and norms, compared with the nearest family, and one for the
    rest."""
    modules = {name: PART.sub("", name) for name in shapes}
    known: set[str] = set()
    for kind in ("attention", "MLP", "experts", "norms"):
        paths_of = {name: _paths(family)[kind] for name, family in FAMILIES.items()}
        met = {name: paths.keys() & {*modules.values()} for name, paths in paths_of.items()}
        nearest = max(met, key=lambda name: (len(met[name]), -len(paths_of[name])))
        roles = paths_of[nearest]
        if not met[nearest]:
            continue
        known |= met[nearest]
        missing = [role for path, role in roles.items() if path not in met[nearest]]
        listed = [
            f"{role} {name} {list(shapes[name])}{_turned(role, shapes[name], hidden)}"
            for path, role in roles.items()
            for name in shapes
            if modules[name] == path and not name.endswith("bias")
        ]
        yield f"{kind} as {nearest}'s: {', '.join(listed)}" + (f"; without {', '.join(missing)}" if missing else "")
    rest = [f"{name} {list(shape)}" for name, shape in shapes.items() if modules[name] not in known]
    if rest:
        more = f" and {len(rest) - SHOWN} more" if len(rest) > SHOWN else ""
        yield f"like no family's: {', '.join(rest[:SHOWN])}{more}"


def _turned(role: str, shape: tuple[int, ...], hidden: int | None) -> str:
    """Return a remark for a matrix (outputs, inputs) whose side of the hidden states is not of the hidden size.

    That side is the outputs of a role that writes to hidden states, and the inputs of others.
    """
    if len(shape) != 2 or hidden is None or role.split(" ")[-1] not in LINEAR_ROLES:
        return ""
    side = 0 if role.split(" ")[-1] in ROWWISE_ROLES else 1
    if shape[side] == hidden:
        return ""
    return " (transposed)" if shape[1 - side] == hidden else f" (not of hidden size {hidden})"


def _paths(family: Family) -> dict[str, dict[str, str]]:
    """Map the kinds of blocks to the paths of a family's modules in files -> their roles."""
    paths: dict[str, dict[str, str]] = {"attention": {}, "MLP": {}, "experts": {}, "norms": {}}
    fused = {role for roles in family.fused.values() for role in roles}
    for role, path in family.block["modules"].items():
        mlp, norm = role in MLP_ROLES, role.endswith(("norm", "layernorm"))
        if role not in fused:
            paths["norms" if norm else "MLP" if mlp else "attention"][path] = role
    for path, roles in family.fused.items():
        paths["MLP" if {*roles} & {*MLP_ROLES} else "attention"][path] = ", ".join(roles)
    if family.mixture is not None:
        mixture = family.mixture.paths
        paths["experts"] = {mixture["router"]: ROUTER}
        if family.mixture.fused:
            fused_experts = family.mixture.fused.items()
            paths["experts"] |= {PART.sub("", name): ", ".join(each.roles) for name, each in fused_experts}
        else:
            paths["experts"] |= {f"{mixture['experts']}.E.{path}": role for role, path in mixture["modules"].items()}
        if shared := mixture.get("shared"):
            inside = mixture.get("shared_modules", mixture["modules"])
            paths["experts"] |= {f"{shared}.{path}": f"shared {role}" for role, path in inside.items()}
    return paths
