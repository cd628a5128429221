"""Trains a solved layer towards the dense model's outputs. docs/methods.md#refinement.

Legend: M samples of a shard, S sequence, D hidden, B samples of a step.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lamina.factored_lamina import stored_factors, stored_state
from manifests.errors import NumericsError
from manifests.method_entry import Refine as Settings
from manifests.records import ArrayRecord, RefinedFigures, StagedLayer
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.attention import deterministic_attention
from pipeline.kernels.refinement import Trained, Training, held_out_samples, step_samples, train_, training_steps
from pipeline.methods.method import Moment, Solution, Statistics, Task
from pipeline.methods.moments import OUTPUT_GRADIENT
from pipeline.rounding.schemes import unpacked_weights
from pipeline.units.units import Refine, SolvedGroup
from stores.activations import ActivationStore
from stores.headers import DTYPES
from stores.staging import read_staged
from workers.config import WorkerConfig
from workers.differentiable import residual_dtype
from workers.layers import LayerReader
from workers.solving import GroupProblem, NamedSolution, named_solution
from workers.tapped_layer import TappedLayer, overflow_advice

RATES = (3e-3, 7.5e-4)  # the change of a matrix in a step, relative to the matrix; tried in this order


class RefineRunner:
    """Runs a worker's `Refine` units."""

    def __init__(
        self,
        setup: WorkerConfig,
        layers: LayerReader,
        store: ActivationStore,
        problem: Callable[[Task], GroupProblem],
        statistics: Callable[[int, Mapping[Moment, ArrayRecord]], Statistics],
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`problem`: returns the problem of a group, with its rounding settings. `statistics`: reads the moments of a
        layer."""
        self.setup = setup
        self.layers = layers
        self.store = store
        self.problem = problem
        self.statistics = statistics
        self.computing = computing

    def run(self, unit: Refine) -> tuple[list[NamedSolution], RefinedFigures]:
        """Train a layer. Return the trained groups, and the figures of the training.

        Raises CorruptError if the staged layer, the stored hidden states or the moment of the gradient are damaged, and
        NumericsError if the initial error is not finite.
        """
        self.layers.release_layer()
        targets, settings = RefinementData(self.store, unit.targets, self.setup), unit.groups[0].task.refine
        assert settings is not None
        seed = self.setup.manifest.seed if self.setup.manifest else 0
        training = replace(
            training_of(settings, *self.setup.tokens_shape, seed),
            floor=rounding_floor(self.setup.dtype),
        )
        layer = TrainedLayer(self._block(unit), self._trained_dtypes(unit), self.setup.dtype)
        with self.computing():
            try:
                trained, train_before, train_after = layer.train_(targets, training, self._gradient(unit))
            except ValueError as error:
                advice = overflow_advice(self.setup.dtype)
                raise NumericsError(f"layer {unit.layer}: refinement: {error}; {advice}") from error
        solved = [self._solved(unit, group, layer, targets) for group in unit.groups]
        figures = RefinedFigures(
            kept=trained.steps > 0,
            before=trained.before,
            after=trained.after,
            train_before=train_before,
            train_after=train_after,
            steps=trained.steps,
            steps_done=trained.steps_done,
            learning_rate=trained.rate,
            rates=tuple((rate, error) for rate, error in trained.rates if math.isfinite(error)),
            held_out=len(training.held_out),
            samples=len(training.train),
        )
        return solved, figures

    def _gradient(self, unit: Refine) -> Tensor | None:
        """Return the mean of the gradient's moment at the layer's outputs (D, D), if the unit has it."""
        if unit.gradient is None:
            return None
        return self.statistics(unit.layer, {OUTPUT_GRADIENT: unit.gradient}).mean(OUTPUT_GRADIENT)[0]

    def _block(self, unit: Refine) -> TappedLayer:
        """Return the draft layer with parameters in the dtype of training."""
        geometry, dtype = self.setup.geometry.layers[unit.layer], residual_dtype(self.setup.dtype)
        config = copy.copy(self.layers.config)
        forms = unit.staged.as_json()["forms"]
        config.forms = [forms if index == unit.layer else {} for index in range(config.num_hidden_layers)]
        tensors = unpacked_weights(read_staged(self.setup.run_dir, unit.staged), unit.staged.rounded)
        placed = {
            name.removeprefix(geometry.prefix): tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
            if name.startswith(geometry.prefix)
        }
        with torch.inference_mode(False), torch.no_grad():
            return TappedLayer(config, geometry, placed, self.layers.device)

    def _trained_dtypes(self, unit: Refine) -> dict[str, torch.dtype]:
        """Map the tensors to train, by their names below the layer, to the dtypes in which they are stored.

        Writers of latents are not trained, because the scale of a narrowed one is far below a training step.
        """
        geometry = self.setup.geometry.layers[unit.layer]
        block = geometry.latent_attention
        fixed = tuple(f"{geometry.path(latent.writer.role)}." for latent in (block.latents if block else ()))
        names = [name for group in unit.groups for name in group_tensors(unit.staged, group, geometry).values()]
        names = [name for name in names if not name.startswith(fixed)]
        dtypes = {name.removeprefix(geometry.prefix): DTYPES[unit.staged.tensors[name].dtype] for name in names}
        return {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}

    def _solved(self, unit: Refine, group: SolvedGroup, layer: TrainedLayer, targets: RefinementData) -> NamedSolution:
        """Return a group with its trained tensors. With `quantize`, round them by the moments of their inputs."""
        geometry, state = self.setup.geometry.layers[unit.layer], layer.state()
        names = group_tensors(unit.staged, group, geometry)
        tensors = {key: state[name.removeprefix(geometry.prefix)] for key, name in names.items()}
        report = {name: value for name, value in group.report.items() if name != "refitted"}
        solution, problem = Solution(tensors, dict(group.forms), report), self.problem(group.task)
        if problem.quantize is not None and problem.quantize.feedback is not False:
            roles = [role for role in group.task.roles if role in geometry.reads]
            solution.inputs.update({role: partial(layer.moment, targets, role) for role in roles})
        return named_solution(problem, group.ranks, {}, solution)


class RefinementData:
    """The dense layer's outputs and the compressed model's inputs of all samples, in float32 or better."""

    def __init__(self, store: ActivationStore, records: Sequence[ArrayRecord], setup: WorkerConfig) -> None:
        self.readers = [store.open(record) for record in records]
        self.ends = [*accumulate(setup.samples_of(shard) for shard in range(len(records)))]
        self.dtype = residual_dtype(setup.dtype)
        self.device = torch.device("cuda" if setup.use_gpu else "cpu")
        self.cached: dict[int, Tensor] = {}
        self.free_bytes = setup.hidden_bytes

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, S, D) of some samples."""
        pairs_BSC = torch.stack([self._sample(sample) for sample in samples])
        target_BSD, input_BSD = pairs_BSC.to(self.device).to(self.dtype).chunk(2, dim=-1)
        return input_BSD, target_BSD

    def _sample(self, sample: int) -> Tensor:
        """Return the stored numbers of a sample (S, 2·D), from host memory if they are cached."""
        if sample in self.cached:
            return self.cached[sample]
        shard = bisect_right(self.ends, sample)
        place = sample - (self.ends[shard - 1] if shard else 0)
        values_SC = self.readers[shard].read(place, place + 1)[0]
        if values_SC.nbytes <= self.free_bytes:
            self.free_bytes -= values_SC.nbytes
            self.cached[sample] = values_SC
        return values_SC


class TrainedLayer:
    """A layer with some trainable tensors. A GPU multiplies in bfloat16 if the model is in half precision."""

    def __init__(self, block: TappedLayer, dtypes: Mapping[str, torch.dtype], stored: torch.dtype) -> None:
        """`dtypes`: the stored names of the tensors to train, and the dtypes in which they are stored. `stored`: the
        model's dtype."""
        self.block = block
        stored_names = {name: stored_name for name, (stored_name, _) in stored_factors(block.module).items()}
        named = {stored_names.get(name, name): values for name, values in block.module.named_parameters()}
        self.parameters = {name: named[name].requires_grad_() for name in dtypes}
        self.dtypes = {id(self.parameters[name]): dtype for name, dtype in dtypes.items()}
        self.half_precision = block.device.type == "cuda" and stored.itemsize == 2

    def train_(
        self, targets: RefinementData, training: Training, gradient_DD: Tensor | None = None
    ) -> tuple[Trained, float, float]:
        """Train the tensors. Return the result, and the relative errors before and after it on as many training samples
        as are held out.

        `gradient_DD`: the moment of the loss's gradient at the outputs. With it, an error is the mean of the square
        error and of the one weighted by the moment, which is scaled so that both are equal before the training.
        """
        measured = training.train[:: max(1, len(training.train) // len(training.held_out))][: len(training.held_out)]
        scale = self._mean_square(targets, training.held_out)
        metric_DD = None if gradient_DD is None else self._metric(targets, training.held_out, gradient_DD)
        before = self._mean_error(targets, measured, metric_DD) / scale
        parameters = [*self.parameters.values()]
        dtypes = [self.dtypes[id(values)] for values in parameters]
        trained = train_(parameters, lambda samples: self._error(targets, samples, metric_DD) / scale, training, dtypes)
        for values in parameters:
            values.requires_grad_(False)
        return trained, before, self._mean_error(targets, measured, metric_DD) / scale

    @torch.no_grad()
    def _metric(self, targets: RefinementData, samples: Sequence[int], gradient_DD: Tensor) -> Tensor | None:
        """Return the metric ½ (I + c G) of the errors, or None if a mean error of the samples is zero or not finite."""
        gradient_DD = (gradient_DD / gradient_DD.diagonal().mean()).to(targets.device, targets.dtype)
        plain = weighted = 0.0
        for sample in samples:
            error_BSD = self._difference(targets, [sample])
            plain += float(_quadratic_form(error_BSD))
            weighted += float(_quadratic_form(error_BSD, gradient_DD))
        plain, weighted = plain / len(samples), weighted / len(samples)
        if not (0.0 < weighted < math.inf and 0.0 < plain < math.inf):
            return None
        metric_DD = gradient_DD.mul_(0.5 * plain / weighted)
        metric_DD.diagonal().add_(0.5)
        return metric_DD

    def state(self) -> dict[str, Tensor]:
        """Return the layer's tensors, by their stored names below the layer."""
        return {name: values.detach() for name, values in stored_state(self.block.module).items()}

    def moment(self, targets: RefinementData, role: str) -> Tensor:
        """Return the second moment (F, F) per token, float64, of the inputs of a role's module on all samples."""
        total: Tensor | None = None
        tokens = 0

        def add(_: Any, arguments: tuple[Any, ...]) -> None:
            nonlocal total, tokens
            values_TF = arguments[0].flatten(0, -2).to(targets.dtype)
            product_FF = (values_TF.mT @ values_TF).double()
            total = product_FF if total is None else total.add_(product_FF)
            tokens += len(values_TF)

        handle = self.block.module.role(role).register_forward_pre_hook(add)
        try:
            with torch.no_grad():
                for sample in range(len(targets)):
                    self._forward(targets.read([sample])[0])
        finally:
            handle.remove()
        assert total is not None, "a layer calls the module of each role"
        return total / tokens

    def _forward(self, input_BSD: Tensor) -> Tensor:
        angles = self.block.angles(input_BSD.detach())
        with deterministic_attention(self.block.device), self._computing():
            output_BSD: Tensor = self.block.module(input_BSD, position_embeddings=angles)
        return output_BSD

    def _computing(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.half_precision else nullcontext()

    def _difference(self, targets: RefinementData, samples: Sequence[int]) -> Tensor:
        """Return the difference (B, S, D) of the layer's outputs to their targets."""
        input_BSD, target_BSD = targets.read(samples)
        return self._forward(input_BSD) - target_BSD

    def _error(self, targets: RefinementData, samples: Sequence[int], metric_DD: Tensor | None = None) -> Tensor:
        return _quadratic_form(self._difference(targets, samples), metric_DD)

    @torch.no_grad()
    def _mean_error(self, targets: RefinementData, samples: Sequence[int], metric_DD: Tensor | None = None) -> float:
        return sum(float(self._error(targets, [sample], metric_DD)) for sample in samples) / len(samples)

    @torch.no_grad()
    def _mean_square(self, targets: RefinementData, samples: Sequence[int]) -> float:
        return sum(float(targets.read([sample])[1].square().mean()) for sample in samples) / len(samples)


def _quadratic_form(error_BSD: Tensor, metric_DD: Tensor | None = None) -> Tensor:
    """Return the mean of eᵀMe / D over tokens; without a metric M, the mean square of e."""
    return error_BSD.square().mean() if metric_DD is None else (error_BSD * (error_BSD @ metric_DD)).mean()


def group_tensors(staged: StagedLayer, group: SolvedGroup, geometry: LayerGeometry) -> dict[str, str]:
    """Map the keys of a group's tensors in its solution to their names in the staged layer."""
    roles = group.task.roles
    paths = {f"{role}.": f"{geometry.path(role)}." for role in roles}
    for form in group.forms.values():
        owner = form.group or group.task.name
        paths[f"{owner}.{form.form}."] = f"{geometry.group_path(roles, owner)}.{form.form}."
    return {
        key + name.removeprefix(path): name
        for key, path in paths.items()
        for name in staged.tensors
        if name.startswith(path)
    }


def rounding_floor(stored: torch.dtype) -> float:
    """Return the relative squared error of rounding hidden states to this dtype, and of computing with them."""
    stored_eps, computed_eps = torch.finfo(stored).eps, torch.finfo(residual_dtype(stored)).eps
    return max(stored_eps**2 / 48, (16 * computed_eps) ** 2)


def training_of(settings: Settings, samples: int, sequence: int, seed: int) -> Training:
    """Return the samples and settings of a layer's training. At most a tenth of the samples is held out."""
    count = held_out_samples(samples, sequence)
    held_out = [(2 * place + 1) * samples // (2 * count) for place in range(count)]
    train = [sample for sample in range(samples) if sample not in held_out]
    if settings.tokens != "all":
        count = max(1, min(len(train), settings.tokens // sequence))
        train = [train[place * len(train) // count] for place in range(count)]
    return Training(
        train=train,
        held_out=held_out,
        steps=training_steps(settings.steps, sequence),
        batch=step_samples(sequence),
        rates=RATES if settings.learning_rate == "auto" else (settings.learning_rate,),
        seed=seed,
    )
