"""The interface of compression methods; driver and workers know methods through it and `capabilities.py` alone.

Legend: D hidden, F features of a tap, G groups, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from manifests.method_entry import Refine
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import owner_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.sensitivity import Factored
from pipeline.ranks.budget import RankVariable

Ranks = Mapping[str, int]
Weights = Mapping[str, Tensor]
Key = tuple[int, str, str]


@dataclass(frozen=True, order=True)
class Moment:
    """A statistic: the uncentred second moment, summed over tokens, of what passes a point of the layer.

    Attributes:
        point: `role.in` or `role.out`; roles that share their input share the moment (`attention.in`, `mlp.in`). Of
            gradients besides: `mid` and `out`, the residual stream after attention and after the layer (one and the
            same in a parallel block), and `pull:ROLE+ROLE`, the gradient Σ W_roleᵀ g_role at the roles' shared input.
        heads: the F features are cut in `heads` equal parts, each with a moment of its own.
        groups: the moments of consecutive heads are summed into `groups` of them: (groups, F/heads, F/heads).
        kind: of the activations, over the calibration tokens; or of the gradients of the samples' log-likelihood,
            labels drawn from the model, over the gradient tokens. docs/methods.md#gradient-moments.
            Or a sample: no moment at all, but the values themselves, (1, tokens, F) in the forward's dtype.
            Or a pair: (1, F + D, F), Σ x xᵀ and below it Σ e xᵀ, x at the point of a layer that is partly compressed,
            behind compressed ones, and e (D numbers) what the dense layer behind dense ones has more: of
            `attention.in` and `mlp.in` at the same point, of `o.in` in the residual stream after attention, of
            `down.in` in that after the layer. docs/methods.md#corrections.
        diagonal: the sums of squares alone, (groups, F/heads).
        tokens: of a sample, at most; they are spread evenly over the calibration tokens.
    """

    point: str
    heads: int = 1
    groups: int = 1
    kind: Literal["value", "gradient", "sample", "pair"] = "value"
    diagonal: bool = False
    tokens: int = 0

    @property
    def key(self) -> str:
        """A name for files."""
        point = re.sub(r"[:+]", "-", self.point)
        if self.kind == "sample":
            return f"sample-{point}-{self.tokens}"
        kind = "" if self.kind == "value" else f"{self.kind}-"
        return f"{kind}{point}-{self.heads}-{self.groups}{'-diagonal' if self.diagonal else ''}"


@dataclass(frozen=True)
class Statistics:
    """The statistics of a layer on the calibration text, as methods receive them.

    Attributes:
        moments: those that the group asked for. Values are summed over the tokens that pass their point. Gradients are
            means per token, shrunk towards their diagonal (`kernels.shrinkage`). Samples are unchanged.
        tokens: the number of calibration tokens; 0 for a data-free group. Means divide by it whatever passed a point,
            so that a point that few tokens pass counts for little.
        passed: moment -> the number of tokens that passed its point, for points that not all of them passed.
        hint: `Curve.hint` of the group's curve, if the curve was taken of the same statistics.
        factors: filled by `moments.factored_mean`: moment -> it and the factor of its mean; a layer's groups share it.
    """

    moments: Mapping[Moment, Tensor] = field(default_factory=dict)
    tokens: int = 0
    hint: str = ""
    passed: Mapping[Moment, int] = field(default_factory=dict)
    factors: dict[Moment, tuple[Tensor, Factored]] = field(default_factory=dict, compare=False, repr=False)

    def tokens_at(self, moment: Moment) -> int:
        """Return the number of tokens that passed the point of a moment of values."""
        return self.passed.get(moment, self.tokens)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Return the points that no token passed."""
        return tuple(moment.point for moment, tokens in self.passed.items() if not tokens)

    def mean(self, moment: Moment) -> Tensor:
        """Return a moment per calibration token, float64, whatever its kind."""
        total = self.moments[moment].to(torch.float64)
        return total if moment.kind == "gradient" else total / self.tokens

    def with_mean(self, moment: Moment, mean: Tensor) -> Statistics:
        """Return statistics in which a moment of values has this mean per token."""
        return replace(self, moments={**self.moments, moment: mean * self.tokens})


@dataclass(frozen=True)
class Scores:
    """Scores that ranks may follow; only those that a method of the job needs are present.

    Attributes:
        importance: layer -> t_l, how far it turns its input on calibration text. docs/methods.md#importance.
        measured: what `Measuring.measure` gave, by `Task.key`; a method gets its own, by `group_key`. None before
            anything is measured: all layers then count as alike.
        curves: what `Predicting.curve` gave, by `Task.key`. None before any is taken.
    """

    importance: Mapping[int, float] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    curves: Mapping[str, Curve] | None = None


@dataclass(frozen=True)
class Group:
    """Tensors that a method compresses together in one layer: one unit of solving.

    Attributes:
        roles: the roles whose tensors are claimed; nobody else may claim them.
        moments: the statistics needed; empty for a data-free group.
        corrections: pairs, each taken on the layer as the corrections of points before it have left it; with any, the
            group is not compressed at once but by a `Correcting.correct` for each.
        pieces: into how many its curve may be cut, by a `Dividing` method.
    """

    layer: int
    name: str
    roles: tuple[str, ...]
    moments: tuple[Moment, ...] = ()
    corrections: tuple[Moment, ...] = ()
    pieces: int = 1


@dataclass(frozen=True)
class Task(Group):
    """A group and who compresses it: the position of the method in the manifest.

    `refine`: how its stored numbers are trained after the solve; None: they are not.
    """

    method: int = field(kw_only=True)
    refine: Refine | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, method: int, group: Group, refine: Refine | None = None) -> Task:
        """The group, claimed by the method at this position."""
        return cls(**{each.name: getattr(group, each.name) for each in fields(Group)}, method=method, refine=refine)

    @property
    def key(self) -> str:
        """Return the key, as `task_key`."""
        return task_key(self.layer, self.method, self.name)


def task_key(layer: int, method: int, group: str) -> str:
    """Names a task in the ledger, among ranks, curves and what is measured: `LAYER/METHOD/GROUP`."""
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
    """Names a group among those of one method: `LAYER/GROUP`."""
    return f"{layer}/{group}"


@dataclass(frozen=True)
class Solution:
    """The compressed tensors of a group.

    Attributes:
        tensors: `role.weight`, `role.bias`, `role.first.weight`, ... -> factor, or the tensor itself; `GROUP.FORM.…`,
            with the group's name and form, for what belongs to no single role. Integers are stored as they are.
        forms: role -> form and ranks, as the checkpoint's config holds them; a dense role is left out.
        report: figures for the summary: errors, fallbacks, condition numbers.
        inputs: role -> what makes the second moment (F, F), per token, of what its stored matrix reads, where that is
            not what the dense one reads and calibration text tells: `o` behind a value basis, `down` behind channels
            that stay. Rounding alone asks for it.
        outputs: role -> which of the dense one's outputs it gives, where that is some of them: gate and up of those
            channels.
    """

    tensors: dict[str, Tensor]
    forms: dict[str, FormSpec]
    report: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def stored_dtype(key: str, tensor: Tensor, weights: Weights, forms: Mapping[str, FormSpec]) -> torch.dtype:
    """The dtype in which a solution's tensor is stored: a bias keeps its own; a factor has that of the weights that it
    stands for, of several the widest; integers stay. `forms`: of the solution."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if key.endswith(".bias") and key in weights:
        return weights[key].dtype
    matrices = {name: weight.dtype for name, weight in weights.items() if name.endswith(".weight")}
    served = [f"{role}.weight" for role in served_roles(key, forms)]
    dtypes = [dtype for name, dtype in matrices.items() if name in served] or [*matrices.values()]
    return reduce(torch.promote_types, dtypes)


def served_roles(key: str, forms: Mapping[str, FormSpec]) -> tuple[str, ...]:
    """The roles whose outputs a solution's tensor is for: its own, those that share its first factor, or those whose
    forms name the group that it belongs to."""
    owner = owner_of(key, forms)
    part = key.removeprefix(f"{owner}.")
    group = forms[owner].group if owner in forms and part.startswith("first") else None
    sharing = [role for role, form in forms.items() if form.group and form.group in (group, owner)]
    return tuple(dict.fromkeys((owner, *sharing)))


class Method(Protocol):
    """A compression method bound to its manifest entry. Everything it computes is pure."""

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        ...

    @property
    def own_class(self) -> bool:
        """Return True if OUTPUT is an ordinary checkpoint of a class that leaves no room for other methods."""
        ...

    @property
    def keep(self) -> float | None:
        """Return a budget of its own, instead of the common one, or None."""
        ...

    @property
    def refine(self) -> Refine | None:
        """Return how stored numbers are trained after the solve, or None."""
        ...

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry gives ranks, so that no budget applies."""
        ...

    @property
    def uniform(self) -> bool:
        """Return True if all layers of a group get one rank."""
        ...

    @property
    def scores(self) -> frozenset[str]:
        """Return the fields of `Scores` from calibration text that the ranks follow: `importance`."""
        ...

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Return further fields of the checkpoint's config.json; two methods may not disagree."""
        ...

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the claimed groups of all layers. Raises ValueError if the geometry does not allow them."""
        ...

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Return the integers to choose, with their costs in stored numbers."""
        ...

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the real-valued rank of every variable at a common `ratio` in (0, 1]."""
        ...

    def most_numbers(self, geometry: Geometry) -> float:
        """A bound on what is stored by an entry with a size of its own, while what its ranks follow is not measured."""
        ...

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """The factors of one group, in a layer of this geometry. `weights`: `role.weight` / `role.bias` of the claimed
        roles, dense; not changed."""
        ...
