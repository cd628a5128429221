"""Reads and checks all inputs of a job before it computes: source, geometry, methods, tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from manifests.errors import InputError, NumericsError
from manifests.schema import Manifest
from pipeline.cost_model.bounds import size_bound
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.remarks import stored_remarks, text_remarks
from pipeline.cost_model.serving_memory import ServingMemory
from pipeline.driver.job_spec import CalibrationPasses
from pipeline.families.foreign import sequence_limit
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import foreign_attention_fault
from pipeline.families.registry import geometry_of
from pipeline.inputs.fitting import fit_remarks, resolve_fit
from pipeline.inputs.sources import describe_dense
from pipeline.inputs.task_names import (
    CHAT_FIELD,
    TASKS_FIELD,
    check_chat_template,
    check_reader_of_rounded,
    check_tasks,
)
from pipeline.inputs.unread_tensors import unread_remarks
from pipeline.kernels.checks import all_finite
from pipeline.methods.base import Method
from pipeline.methods.experts.completing import with_samples_of_others
from pipeline.methods.method import Scores, Task
from pipeline.methods.registry import (
    allocate_ranks,
    build_methods,
    claim_tasks,
    config_fields,
)
from pipeline.rounding.tasks import rounded_tasks, rounding_remarks
from stores.corpus import load_tokenizer
from stores.headers import DTYPES
from stores.model_files import companions
from stores.run_directory import FOLDERS
from stores.source import SourceCheckpoint, is_hub_id, open_source
from stores.storage import contains, open_storage
from workers.config import FORWARD_DTYPES

T = TypeVar("T")
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MEASURE_LAYERS = "budget.measure_layers"
MEASURED_FROM = 12  # layers; with fewer, measured layers gain little
STORED_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES}


@dataclass(frozen=True, eq=False)  # hashed by identity, so that results computed from a job's inputs can be cached
class Inputs:
    """The inputs of a job, checked as far as headers and configs allow.

    Attributes:
        serving: where the manifest says `budget.fit`, the memory of serving beside the weights. The manifest here has
            `budget.bytes` in its place.
        rounds: round solved matrices as the manifest says.
    """

    manifest: Manifest
    source: SourceCheckpoint
    config: Mapping[str, Any]
    geometry: Geometry
    methods: tuple[Method[Any], ...]
    tasks: tuple[Task, ...]
    dtype: torch.dtype
    serving: ServingMemory | None = None
    rounds: bool = True

    @property
    def dtype_name(self) -> str:
        """The dtype as config.json names it."""
        return STORED_NAMES[self.dtype]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(record.num_bytes for record in self.source.tensors.values())

    @cached_property
    def planned(self) -> PlannedJob:
        """The job as the cost model reads it."""
        return PlannedJob(self.manifest, self.geometry, self.methods, self.tasks)

    @property
    def claimed_layers(self) -> list[int]:
        """The layers that have a task, ascending."""
        return [layer.index for layer, _ in self.planned.claimed]

    @property
    def passes(self) -> CalibrationPasses:
        """The passes over the calibration text."""
        return self.planned.passes

    @property
    def scores(self) -> frozenset[str]:
        """The scores that any method's ranks depend on."""
        return self.passes.scores

    def of_layers_alone(self) -> Inputs:
        """Return the inputs of a first solve, each of whose layers is measured among dense ones: none corrects the
        layers before it or is trained, and codes of given bits come later."""
        tasks = tuple(replace(task, corrections=(), refine=None) for task in self.tasks)
        return replace(self, tasks=tasks, rounds=not self.manifest.measures_unrounded)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Messages to the user before anything is computed."""
        of_methods = tuple(
            f"methods.{position} ({method.name}): {remark}"
            for position, method in enumerate(self.methods)
            for remark in method.remarks(self.geometry)
        )
        of_model = _foreign_remarks(self.geometry, self.tasks) + _further_remarks(self.source)
        expected = {*self.geometry.expected_tensors(), f"{self.config['block']['head']}.weight"}
        of_model += unread_remarks(self.source, expected, bool(self.config.get("wrapper")))
        of_model += fit_remarks(self.serving, self.geometry) + self._size_remarks + stored_remarks(self.planned)
        return of_methods + of_model + rounding_remarks(self.manifest, self.geometry) + text_remarks(self.planned)

    @property
    def _size_remarks(self) -> tuple[str, ...]:
        """A remark if the result may be as large as a source in a stored format."""
        kinds = sorted({record.form.kind for record in self.source.tensors.values() if record.form is not None})
        most = size_bound(self.planned, self.source_bytes).num_bytes if kinds else 0
        if not kinds or most < self.source_bytes:
            return ()
        return (
            f"model: its weights are stored in {', '.join(kinds)}, {self.source_bytes:,} bytes in all; weights that "
            f"methods change are stored in {self.dtype_name}, so that the result may have {most:,} bytes, which is not "
            "smaller: give budget.bytes, or quantize",
        )

    @property
    def needs_calibration(self) -> bool:
        """True if any method needs statistics, corrections, importance or training."""
        needs = any(task.moments or task.corrections or task.refine for task in self.tasks)
        return needs or "importance" in self.scores

    @property
    def max_loss(self) -> float | None:
        """The limit of the loss that determines the size; None if the manifest gives the size."""
        return self.manifest.budget.max_loss if self.manifest.budget else None

    @property
    def measures_sizes(self) -> str:
        """The field of the manifest that makes the job compress and score several sizes; empty without such a field."""
        return _measures_sizes(self.manifest)

    def at_size(self, size: int) -> Inputs:
        """Return these inputs with a budget of `size` thousandths in place of the limit of the loss."""
        assert self.manifest.budget is not None
        budget = self.manifest.budget.model_copy(update={"keep": size / 1000, "max_loss": None})
        return replace(self, manifest=self.manifest.model_copy(update={"budget": budget}))


def read_inputs(manifest: Manifest, weights: bool = True) -> Inputs:
    """Open the source (headers only) and check manifest and model against each other.

    `weights`: after all checks, download the weights of a model on the hub.

    Raises:
        InputError: with every fault. Nothing was written.
    """
    return opened_model(manifest, weights, partial(check_inputs, manifest))


def opened_model(manifest: Manifest, weights: bool, check: Callable[[SourceCheckpoint, Mapping[str, Any]], T]) -> T:
    """Return the result of `check` for a manifest's model and config. `check` runs before the weights are downloaded,
    and again with them."""
    model = manifest.model
    source = open_source(model.source, model.revision, code=model.trust_remote_code)
    if not weights or is_hub_id(model.source):
        checked = check(*describe_dense(source, weights=False))
    return check(*describe_dense(source)) if weights else checked


def check_inputs(manifest: Manifest, source: SourceCheckpoint, config: Mapping[str, Any]) -> Inputs:
    """Check a manifest and an open model against each other. Raises InputError."""
    geometry = geometry_of(config)
    dtype = layer_dtype(source, geometry)
    stored_bits = {name: 8 * record.torch_dtype.itemsize for name, record in source.tensors.items()}
    geometry = geometry_of(config, 8 * dtype.itemsize, stored_bits, source.stored_bytes())
    source_bytes = sum(record.num_bytes for record in source.tensors.values())
    manifest, serving = fitted(manifest, config, geometry, source_bytes)
    methods, tasks = fit_methods(manifest, geometry)
    inputs = Inputs(manifest, source, config, geometry, methods, tasks, dtype, serving)
    config_fields(methods)
    _check_formats(source, config, methods)
    if inputs.needs_calibration and manifest.calibration is None:
        raise InputError("calibration: missing; the methods of this manifest need statistics or importance on a text")
    _check_tasks_of(manifest, source)
    _check_sequence(manifest, config)
    _check_places(manifest, source)
    companions(source.storage, manifest.model.trust_remote_code)  # refuses links out of the model's folder
    return inputs


def _foreign_remarks(geometry: Geometry, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return a remark for a model whose foreign attention no method claims."""
    foreign = {(layer.index, role) for layer in geometry.layers for role in layer.foreign_roles}
    if not foreign or any((task.layer, role) in foreign for task in tasks for role in task.roles):
        return ()
    if any(layer.foreign and layer.latent_attention is None for layer in geometry.layers):
        return (f"model: {foreign_attention_fault(geometry.layers)} unchanged",)
    return (
        f"model: the latent attention of {geometry.model_type} models is copied unchanged; loss_aware with "
        "`attention: true` compresses it",
    )


def _further_remarks(source: SourceCheckpoint) -> tuple[str, ...]:
    """Return a remark for a model with layers that predict further tokens."""
    if not source.left_out:
        return ()
    return (
        f"model: {len(source.left_out)} tensors of the layers that predict further tokens are left out "
        f"({source.left_out[0]}, ...): neither transformers nor the compressed model uses them",
    )


def fitted(
    manifest: Manifest, config: Mapping[str, Any], geometry: Geometry, source_bytes: int
) -> tuple[Manifest, ServingMemory | None]:
    """Return the manifest with `budget.bytes` in place of `budget.fit`, as `resolve_fit`. Raises InputError."""
    return resolve_fit(manifest, config, geometry, source_bytes, lambda sized: fit_methods(sized, geometry))


def fit_methods(manifest: Manifest, geometry: Geometry) -> tuple[tuple[Method[Any], ...], tuple[Task, ...]]:
    """Return the methods, and their tasks for a model of this geometry.

    Raises InputError, also if sizes in the manifest exceed the budget.
    """
    if manifest.budget is not None and manifest.budget.scope == "experts" and not geometry.scope_numbers("experts"):
        raise InputError(f"budget.scope: experts: this {geometry.model_type} model has none; give decoder or model")
    methods = build_methods(manifest)
    tasks = claim_tasks(methods, geometry)
    _check_held_experts(manifest, geometry, tasks)
    if manifest.quantize is not None:
        tasks = rounded_tasks(tasks, manifest, geometry)
    tasks = with_samples_of_others(tasks, geometry)
    allocate_ranks(manifest, methods, geometry, Scores(dict.fromkeys(range(geometry.num_layers), 1.0)))
    field = _measures_sizes(manifest)
    if field and (fault := _predicted_loss_fault(field, PlannedJob(manifest, geometry, methods, tasks))):
        raise InputError(fault)
    return methods, tasks


def _check_held_experts(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> None:
    """Raise InputError if `correct: output` applies to a mixture with more experts than a worker holds."""
    for task in tasks:
        experts, held = geometry.layers[task.layer].num_experts, manifest.workers.experts
        if task.corrections and experts > held:
            field = f"methods.{task.method}" if task.method < len(manifest.methods) else "quantize"
            raise InputError(
                f"{field}.correct: output passes all experts of a layer together; layer {task.layer} has {experts}, "
                f"and a worker holds {held}: set workers.experts: {experts}, or leave out correct"
            )


def check_copied(inputs: Inputs) -> None:
    """Check tensors that are only copied, and that no worker reads, for NaN and infinity.

    Needs a few megabytes of memory.

    Raises:
        NumericsError: a tensor holds NaN or infinity.
    """
    claimed = {task.layer for task in inputs.tasks}
    prefixes = tuple(inputs.geometry.layers[layer].prefix for layer in claimed)
    for name, record in inputs.source.tensors.items():
        if record.parts and not name.startswith(prefixes):
            inputs.source.read([name])  # checks the scales
            continue
        if name.startswith(prefixes) or not record.torch_dtype.is_floating_point or record.torch_dtype.itemsize < 2:
            continue
        for piece in inputs.source.copy_bytes(name):
            if not all_finite(torch.frombuffer(bytearray(piece), dtype=record.torch_dtype)):
                raise NumericsError(f"source: tensor {name} holds NaN or infinity; the checkpoint is damaged")


def layer_dtype(source: SourceCheckpoint, geometry: Geometry) -> torch.dtype:
    """Return the dtype of the forward pass and of config.json: the most frequent dtype of the layers' numbers.

    Of two equally frequent dtypes, the wider one. Raises InputError if a layer tensor has another dtype than float32,
    bfloat16, float16 or float64.
    """
    numbers: Counter[str] = Counter()  # buffers of old checkpoints may be bytes
    for layer in geometry.layers:
        for name, shape in layer.tensors().values():
            numbers[source.tensors[name].dtype] += math.prod(shape)
    unsupported = sorted(set(numbers) - set(FORWARD_DTYPES))
    if unsupported:
        raise InputError(
            f"model: layer tensors are stored as {unsupported}; supported are {FORWARD_DTYPES}, not quantised ones"
        )
    return DTYPES[max(numbers, key=lambda name: (numbers[name], DTYPES[name].itemsize, name))]


def _measures_sizes(manifest: Manifest) -> str:
    if manifest.budget is not None and manifest.budget.max_loss is not None:
        return "budget.max_loss"
    if manifest.evaluation.calibrate_prediction:
        return "evaluation.calibrate_prediction"
    return MEASURE_LAYERS if manifest.measures_layers else ""


def measuring_layers(job: PlannedJob, *, possible: bool = True) -> Manifest:
    """Return the manifest with a value in place of `budget.measure_layers: null`: true where it is `possible`, known to
    pay, and needs no second pass over the calibration text."""
    manifest, budget = job.manifest, job.manifest.budget
    if budget is None or budget.measure_layers is not None:
        return manifest
    measures = (
        possible
        and budget.keep != 1.0
        and (budget.keep is not None or budget.bytes is not None)
        and len(job.claimed) >= MEASURED_FROM
        and not any(layer.num_experts for layer in job.geometry.layers)
        and not any(task.refine for task in job.tasks)
        and not _predicted_loss_fault(MEASURE_LAYERS, job)
    )
    return manifest.model_copy(update={"budget": budget.model_copy(update={"measure_layers": measures})})


def _predicted_loss_fault(field: str, job: PlannedJob) -> str:
    """Return why losses cannot be predicted and measured at several sizes, which a field needs; empty if they can."""
    manifest, calibration = job.manifest, job.manifest.calibration
    remedy = "give keep" if field == "budget.max_loss" else "leave it out"
    if job.predicted != {task.key for task in job.tasks}:
        return f"{field}: all methods must follow predicted loss (allocation: loss); or {remedy}"
    if calibration is None or calibration.gradient.kind == "local" or calibration.propagate != "dense":
        return (
            f"{field}: needs calibration with propagate: dense and gradient.kind: model; random gradients "
            "predict no loss in nats"
        )
    if manifest.statistics.keep is False:
        return f"{field}: tries sizes from kept statistics; leave out statistics.keep: false"
    if field == "evaluation.calibrate_prediction" and (manifest.budget is None or manifest.budget.keep is None):
        return f"{field}: measures sizes beside budget.keep; give budget.keep, or leave it out"
    return ""


def _check_formats(source: SourceCheckpoint, config: Mapping[str, Any], methods: Sequence[Method[Any]]) -> None:
    """Raise InputError if OUTPUT cannot hold the source's stored formats."""
    if not source.stored_bytes():
        return
    owner = next((method.name for method in methods if method.own_class), None)
    what = f"OUTPUT of {owner} is an ordinary checkpoint" if owner else "OUTPUT keeps the class of a multimodal model"
    if owner or config.get("wrapper"):
        raise InputError(
            f"model: its weights are in a stored format, and {what}, which holds none; give the model in 16 bits"
        )


def _check_sequence(manifest: Manifest, config: Mapping[str, Any]) -> None:
    name, limit = sequence_limit(config)
    lengths = {"calibration.sequence_length": manifest.calibration.sequence_length if manifest.calibration else 0}
    if manifest.evaluation.perplexity:
        lengths["evaluation.perplexity.window"] = manifest.evaluation.perplexity.window
    for field, length in lengths.items():
        if length > limit:
            raise InputError(f"{field}: {length} is longer than the model's {name} {limit}")


def _check_places(manifest: Manifest, source: SourceCheckpoint) -> None:
    places = {"output": open_storage(manifest.output), "run_dir": open_storage(manifest.run_dir)}
    model = source.storage.address
    for name, place in places.items():
        if contains(place.address, model) or contains(model, place.address):
            raise InputError(
                f"{name}: {place.address} and the model {model} contain each other; Lamina never writes into the source"
            )
        if fault := place.fault():
            raise InputError(f"{name}: {place.address} is {fault}")
    output, run_dir = places["output"].address, places["run_dir"].address
    if contains(output, run_dir):
        raise InputError(f"output: {output} must not hold run_dir {run_dir}; give two separate directories")
    if holding := [folder for folder in FOLDERS if contains(f"{run_dir}/{folder}", output)]:
        raise InputError(
            f"output: {output} is in {holding[0]}, where run_dir {run_dir} keeps its own files; give another"
        )


def _check_tasks_of(manifest: Manifest, source: SourceCheckpoint) -> None:
    """Raise InputError if the tasks of the evaluation are not known, or cannot be scored as the manifest asks."""
    tasks, whole = manifest.evaluation.tasks, manifest.evaluation.whole_model
    check_tasks(tasks, TASKS_FIELD, (manifest.output, manifest.model.source) if whole else None)
    rounded = manifest.quantize is not None and "uniform" in manifest.quantize.kinds_of_levels
    if tasks and whole and rounded:
        check_reader_of_rounded(TASKS_FIELD)
    if tasks and manifest.evaluation.chat_template:
        tokenizer = load_tokenizer(source.storage, manifest.model.trust_remote_code)
        check_chat_template(tokenizer, CHAT_FIELD, manifest.model.source)
