"""The exact size of OUTPUT, tensor by tensor, if the manifest fixes every shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lamina import LayersConfig
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.factored_lamina import stored_state
from manifests.errors import InputError
from manifests.quantize import OUTER_ROLES, Quantize
from manifests.records import FormSpec, Scheme
from pipeline.checkpoint.counting import claimed_tensors, numbers_of_tensor
from pipeline.cost_model.bounds import Size
from pipeline.cost_model.estimate import Plan, make_plan
from pipeline.inputs.job_inputs import Inputs
from pipeline.methods.method import Scores, Solution, Task, stored_dtype
from pipeline.methods.registry import allocate_ranks, measure_tasks, predict_tasks
from pipeline.rounding.schemes import LEVELS, SCALE, WEIGHT, packed_dtype, packed_shapes
from pipeline.rounding.solutions import fitting_group, rounded_matrices
from stores.formats import keeps
from stores.headers import DTYPE_NAMES, DTYPES, TensorRecord

Ranks = Mapping[str, Mapping[str, int]]


def plan_of(inputs: Inputs) -> Plan:
    """Return the plan of a job. Raises InputError if a matrix cannot be rounded at its rank."""
    return bounded_plan(inputs, planned_size(inputs))


def bounded_plan(inputs: Inputs, size: Size | None = None) -> Plan:
    """Return a plan with the checkpoint's `size`, or an upper bound on it."""
    return make_plan(inputs.planned, inputs.source_bytes, size)


def planned_size(inputs: Inputs) -> Size | None:
    """Return numbers, before rounding, and bytes of OUTPUT's tensors, or None if ranks or forms depend on the data.

    Raises the InputErrors of `plan_of`.
    """
    ranks, claimed = known_ranks(inputs), claimed_tensors(inputs)
    if ranks is None or claimed.keys() & inputs.source.stored_bytes().keys():  # unchanged weights keep their format
        return None
    groups = inputs.planned.groups
    forms = {task: groups[task.key].forms(ranks[task.key]) for task in inputs.tasks}
    known = {task: each for task, each in forms.items() if each is not None}
    if len(known) < len(forms):
        return None
    itemsize, tensors = inputs.dtype.itemsize, inputs.source.tensors.items()
    copied = [record for name, record in tensors if name not in claimed]
    sizes = [Size(numbers_of_tensor(each.dtype, each.shape, itemsize), _num_bytes(each)) for each in copied]
    sizes += _claimed_sizes(inputs, known)
    return Size(sum(size.numbers for size in sizes), sum(size.num_bytes for size in sizes))


def _num_bytes(record: TensorRecord) -> int:
    """Return the bytes of a copied tensor; decoded from its storage format, unless OUTPUT keeps that."""
    parts = record.stored if keeps(record) else (record,)
    return sum(math.prod(part.shape) * part.torch_dtype.itemsize for part in parts)


def known_ranks(inputs: Inputs) -> Ranks | None:
    """Return the ranks by task if no measurement can change them, else None."""
    manifest, methods, geometry = inputs.manifest, inputs.methods, inputs.geometry
    quantize = manifest.quantize
    chosen = quantize is not None and "auto" in (quantize.bits, quantize.levels)
    if chosen or inputs.max_loss is not None:
        return None
    measuring = {task.method for task in measure_tasks(methods, geometry)}
    if predict_tasks(methods, geometry) or any(methods[position].fixed_ranks for position in measuring):
        return None
    alike = dict.fromkeys(range(geometry.num_layers), 1.0) if inputs.scores else {}
    ranks = allocate_ranks(manifest, methods, geometry, Scores(alike))
    return ranks if not (inputs.scores or measuring) or _all_full(inputs, ranks) else None


def _all_full(inputs: Inputs, ranks: Ranks) -> bool:
    """Return True if every rank is at its cap, so that neither scores nor measurements can change it."""
    caps = {
        (task.key, variable.name): variable.cap
        for task in inputs.tasks
        for variable in inputs.methods[task.method].rank_variables(inputs.geometry)
        if (variable.layer, variable.group) == (task.layer, task.name)
    }
    return all(ranks[task][name] >= cap for (task, name), cap in caps.items())


def _claimed_sizes(inputs: Inputs, by_task: Mapping[Task, dict[str, FormSpec]]) -> Iterator[Size]:
    """Yield the size of each tensor that replaces a claimed one. `by_task`: the forms of each task."""
    layers: list[dict[str, FormSpec]] = [{} for _ in inputs.geometry.layers]
    for task, forms in by_task.items():
        layers[task.layer] |= forms
    as_json = [{role: form.as_json() for role, form in forms.items()} for forms in layers]
    config = LayersConfig(**{**inputs.config, "forms": as_json})
    states: dict[int, dict[str, Tensor]] = {}
    for task, forms in by_task.items():
        if task.layer not in states:
            with torch.device("meta"):
                states = {task.layer: stored_state(DecoderLayer(config, task.layer))}
        yield from _task_sizes(inputs, task, forms, states[task.layer])


def _task_sizes(inputs: Inputs, task: Task, forms: dict[str, FormSpec], state: Mapping[str, Tensor]) -> Iterator[Size]:
    """Yield the size of each tensor of a task. `state`: the layer's meta tensors, by names inside of the layer."""
    geometry, sources = inputs.geometry.layers[task.layer], inputs.source.tensors
    weights = {
        key: torch.empty(shape, dtype=sources[name].torch_dtype, device="meta")
        for key, (name, shape) in geometry.tensors(task.roles).items()
    }
    inside = [role for role in task.roles if role not in OUTER_ROLES]
    paths = {role: f"{geometry.path(role).removeprefix(geometry.prefix)}." for role in inside}
    tensors = {
        f"{role}.{name.removeprefix(path)}": tensor
        for role, path in paths.items()
        for name, tensor in state.items()
        if name.startswith(path)
    }
    tensors |= {key: weight for key, weight in weights.items() if key.partition(".")[0] in OUTER_ROLES}
    quantize = inputs.manifest.quantize
    try:
        packed = {} if quantize is None else _packed(Solution(tensors, forms), quantize)
    except ValueError as error:
        raise InputError(f"quantize: layer {task.layer}, {task.name}: {error}; give other ranks or groups") from error
    for key, tensor in tensors.items():
        dtype = DTYPE_NAMES[stored_dtype(key, tensor, weights, forms)]
        parts = packed.get(key, {key: tuple(tensor.shape)})
        dtypes = {name: packed_dtype(name) for name in parts if key in packed and not name.endswith((SCALE, LEVELS))}
        num_bytes = (math.prod(shape) * dtypes.get(name, DTYPES[dtype]).itemsize for name, shape in parts.items())
        yield Size(numbers_of_tensor(dtype, tensor.shape, inputs.dtype.itemsize), sum(num_bytes))


def _packed(solution: Solution, quantize: Quantize) -> dict[str, dict[str, tuple[int, ...]]]:
    """Map each rounded matrix to the names and shapes of its packed tensors. Raises ValueError if no group fits."""
    assert quantize.bits != "auto"
    assert quantize.levels != "auto"
    packed = {}
    for matrix in rounded_matrices(solution, quantize.skip):
        rows, columns = solution.tensors[matrix.key].shape
        group = fitting_group(columns, quantize.group)
        scheme = Scheme(bits=quantize.bits, group=group, levels=quantize.levels)
        packed[matrix.key] = packed_shapes({matrix.key: (rows, columns)}, {matrix.key.removesuffix(WEIGHT): scheme})
    return packed
