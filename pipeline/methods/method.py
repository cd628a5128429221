"""The data of compression methods: statistics, tasks, scores and solutions. Their interface: `base.py`.

Legend: D hidden, F features of a tap, G groups, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from manifests.method_entry import Refine
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import owner_of
from pipeline.kernels.deferred import Offload, in_memory
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.text_sources import NO_SOURCES, TextSources

Ranks = Mapping[str, int]
Weights = Mapping[str, Tensor]

FOR_FILES = str.maketrans(":+", "--")  # characters of points that file names do not have


@dataclass(frozen=True, order=True)
class Moment:
    """A statistic of the values at a point of a layer, usually their uncentred second moment, summed over tokens.

    Attributes:
        point: `role.in` or `role.out`; roles with the same input share the moment (`attention.in`, `mlp.in`). Gradients
            also have `mid` and `out`, the residual stream after attention and after the layer (the same in a parallel
            block), and `pull:ROLE+ROLE`, the gradient Σ W_roleᵀ g_role at the roles' shared input.
        heads: the number of equal parts of the F features; each has its own moment.
        groups: the moments of consecutive heads are summed into this many: (groups, F/heads, F/heads).
        kind: one of
            `value`: the second moment of the activations over the calibration tokens.
            `gradient`: the second moment, over the gradient tokens, of the gradients of the samples' log-likelihood,
            with labels drawn from the model. docs/methods.md#gradient-moments.
            `sample`: the values themselves, (1, tokens, F) in the forward's dtype.
            `pair`: (1, F + D, F), Σ x xᵀ and below it Σ e xᵀ. x is the value at the point in the model compressed so
            far. e (D) is the dense model's value minus the compressed model's: at the same point for `attention.in` and
            `mlp.in`, in the residual stream after attention for `o.in`, and after the layer for `down.in`, where both
            are weighted by `kernels.normed.inverse_rms` of the dense stream. For an expert's `down.in`, without
            weights, the sums run over the tokens that the compressed layer sends to it, and e is divided by the number
            of experts per token. docs/methods.md#corrections.
        diagonal: store only the sums of squares, (groups, F/heads).
        tokens: the largest size of a sample, whose tokens are spread evenly over the calibration tokens.
    """

    point: str
    heads: int = 1
    groups: int = 1
    kind: Literal["value", "gradient", "sample", "pair"] = "value"
    diagonal: bool = False
    tokens: int = 0

    @property
    def key(self) -> str:
        """Return a name for files."""
        point = self.point.translate(FOR_FILES)
        if self.kind == "sample":
            return f"sample-{point}-{self.tokens}"
        kind = "" if self.kind == "value" else f"{self.kind}-"
        return f"{kind}{point}-{self.heads}-{self.groups}{'-diagonal' if self.diagonal else ''}"


class OtherInputs(NamedTuple):
    """Tokens of other experts that stand for those that an expert with few tokens lacks.

    Attributes:
        inputs: (m, D), of its readers.
        factor: of its channels, so that all m count as the lacking tokens.
        scale: of sums over own and lacking tokens, so that they count as the own ones.
    """

    inputs: Tensor
    factor: float
    scale: float


@dataclass(frozen=True)
class Statistics:
    """The statistics of a layer on the calibration text, as methods receive them.

    Attributes:
        moments: the moments that the group needs. Values are summed over the tokens that pass their point. Gradients
            are means per token, shrunk towards their diagonal (`kernels.shrinkage`). Samples are unchanged.
        tokens: the number of calibration tokens; 0 for a data-free group. All means divide by it, so that a point with
            few tokens counts for little.
        passed: moment -> the number of tokens that passed its point, for points that some tokens bypass.
        hint: `Curve.hint` of the group's curve, if it was computed from the same statistics.
        factors: the cache of `moments.factored_mean`, shared by a layer's groups: moment -> its sum and the factor of
            its mean.
        offload: stores a tensor until it is read again, for the results of solves of many experts.
        sources: the sources of the calibration text, for the report.
        others: block name -> the tokens by which the moments of an expert with few tokens have been completed.
    """

    moments: Mapping[Moment, Tensor] = field(default_factory=dict)
    tokens: int = 0
    hint: str = ""
    passed: Mapping[Moment, int] = field(default_factory=dict)
    factors: dict[Moment, tuple[Tensor, Factored]] = field(default_factory=dict, compare=False, repr=False)
    offload: Offload = field(default=in_memory, compare=False, repr=False)
    sources: TextSources = NO_SOURCES
    others: Mapping[str, OtherInputs] = field(default_factory=dict, compare=False, repr=False)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Return the points that no token passed, without moments completed by tokens of others."""
        completed = tuple(f"{name}." for name in self.others)
        return tuple(
            moment.point
            for moment, tokens in self.passed.items()
            if not tokens and not (moment.kind == "value" and moment.point.startswith(completed))
        )

    def mean(self, moment: Moment) -> Tensor:
        """Return a moment per calibration token, float64."""
        total = self.moments[moment].to(torch.float64)
        return total if moment.kind == "gradient" else total / self.tokens

    def with_mean(self, moment: Moment, mean: Tensor) -> Statistics:
        """Return statistics in which a moment of values has this mean per token."""
        return replace(self, moments={**self.moments, moment: mean * self.tokens})


@dataclass(frozen=True)
class Scores:
    """Scores that ranks may follow; only those that a method of the job needs are present.

    Attributes:
        importance: layer -> t_l, the angle between its input and output. docs/methods.md#importance.
        measured: results of `Group.measure`, by `Task.key`. A method gets its own results, by `group_key`. None before
            the measurement: all layers then count the same.
        curves: results of `Group.curve`, by `Task.key`. None before they are computed.
    """

    importance: Mapping[int, float] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    curves: Mapping[str, Curve] | None = None


@dataclass(frozen=True)
class Task:
    """A group of a layer, as messages name it: one unit of solving.

    Attributes:
        roles: the roles whose tensors are claimed. No other task may claim them.
        moments: the statistics needed; empty for a data-free group.
        corrections: pairs, each summed on the layer after the corrections of earlier points. A task with corrections is
            solved by one correction for each.
        pieces: the number of pieces into which its curve may be cut.
        method: the position, in the manifest, of the method that compresses it.
        refine: settings for training its stored numbers after the solve; None: no training.
    """

    layer: int
    name: str
    roles: tuple[str, ...]
    moments: tuple[Moment, ...] = ()
    corrections: tuple[Moment, ...] = ()
    pieces: int = 1
    method: int = field(kw_only=True)
    refine: Refine | None = field(default=None, kw_only=True)

    @property
    def key(self) -> str:
        """Return the key, as `task_key`."""
        return task_key(self.layer, self.method, self.name)


def task_key(layer: int, method: int, group: str) -> str:
    """Return the key of a task in the ledger, ranks, curves and measurements: `LAYER/METHOD/GROUP`."""
    return f"{layer}/{method}/{group}"


class TaskName(NamedTuple):
    """The parts of a task's key."""

    layer: int
    method: int
    group: str


def read_task_key(key: str) -> TaskName:
    """Split a key of `task_key` into its parts."""
    layer, method, group = key.split("/", 2)
    return TaskName(int(layer), int(method), group)


def group_key(layer: int, group: str) -> str:
    """Return the key of a group among those of one method: `LAYER/GROUP`."""
    return f"{layer}/{group}"


@dataclass(frozen=True)
class Solution:
    """The compressed tensors of a group.

    Attributes:
        tensors: `role.weight`, `role.bias`, `role.first.weight`, ... -> factor, or the tensor itself. Tensors without a
            single role are named `GROUP.FORM.…`, by the group's name and form. Integers are stored as they are.
            The tensors of a group of many experts may be computed on access.
        forms: role -> form and ranks, as in the checkpoint's config; dense roles are left out.
        report: figures for the summary: errors, fallbacks, condition numbers.
        inputs: role -> a function that computes the second moment (F, F), per token, of the stored matrix's input, if
            it differs from the dense matrix's input and can be computed from the statistics: `o` after a value basis,
            `down` after removed channels. Only rounding uses it.
        outputs: role -> the kept outputs of the dense matrix, if not all are kept: gate and up after removed channels.
    """

    tensors: Mapping[str, Tensor]
    forms: dict[str, FormSpec]
    report: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def stored_dtype(key: str, tensor: Tensor, weights: Weights, forms: Mapping[str, FormSpec]) -> torch.dtype:
    """Return the dtype in which a solution's tensor is stored. A bias keeps its dtype. A factor gets the widest dtype
    of the weights that it replaces. Integers stay. `forms`: the solution's forms."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if key.endswith(".bias") and key in weights:
        return weights[key].dtype
    matrices = {name: weight.dtype for name, weight in weights.items() if name.endswith(".weight")}
    served = [f"{role}.weight" for role in served_roles(key, forms)]
    dtypes = [dtype for name, dtype in matrices.items() if name in served] or [*matrices.values()]
    return reduce(torch.promote_types, dtypes)


def served_roles(key: str, forms: Mapping[str, FormSpec]) -> tuple[str, ...]:
    """Return the roles that use a solution's tensor: its own, those that share its first factor, or those whose forms
    name its group."""
    owner = owner_of(key, forms)
    part = key.removeprefix(f"{owner}.")
    group = forms[owner].group if owner in forms and part.startswith("first") else None
    sharing = [role for role, form in forms.items() if form.group and form.group in (group, owner)]
    return tuple(dict.fromkeys((owner, *sharing)))
