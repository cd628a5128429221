"""The entries under `methods`: one model a method, what may be chosen and what goes together. docs/manifest.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from manifests.blocks import Block, Listed, Share

WIDE, WIDE_MULTIPLE = 1024, 16  # hidden size from which ranks are multiples, and of what, unless the manifest says
LAYERS_PATTERN = re.compile(r"all|last:(0*[1-9][0-9]*|0?\.[0-9]*[1-9][0-9]*|1\.0*)", re.ASCII)


class MethodEntry(Block):
    """What every method's entry may say: which layers, and a `keep` of its own instead of the common budget's.

    `layers`: `all`, `last:N`, `last:SHARE` (`last:0.5`: the deeper half) or a list of numbers from 0. `rank_multiple`
    is the budget's `multiple` for this entry; null: that one.
    """

    layers: str | tuple[int, ...] = "all"
    keep: Share | None = None
    rank_multiple: PositiveInt | None = None

    def multiple(self, hidden_size: int) -> int:
        """What chosen ranks are multiples of, in a model of this hidden size."""
        return self.rank_multiple or (WIDE_MULTIPLE if hidden_size >= WIDE else 1)

    def in_steps_of(self, multiple: int | None) -> Self:
        """This entry; with `multiple` where it says none itself."""
        return self if self.rank_multiple or not multiple else self.model_copy(update={"rank_multiple": multiple})

    @property
    def follows_curves(self) -> bool:
        """Whether ranks follow predicted loss."""
        return getattr(self, "allocation", None) == "loss"

    @property
    def needs_gradient(self) -> bool:
        """Whether ranks or solutions follow what the model's loss feels."""
        return self.follows_curves or getattr(self, "weighting", None) == "loss"

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_known(cls, layers: Any) -> str | tuple[int, ...]:
        if isinstance(layers, str) and LAYERS_PATTERN.fullmatch(layers):
            return layers
        if isinstance(layers, (list, tuple)) and layers and all(type(n) is int and n >= 0 for n in layers):
            return tuple(layers)
        raise ValueError("should be all, last:N, last:SHARE (N and SHARE above 0) or a list of layer numbers from 0")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layer numbers meant, ascending, for a model of `num_layers`. Raises ValueError if one does not exist."""
        if self.layers == "all":
            return tuple(range(num_layers))
        if isinstance(self.layers, str):
            number = self.layers.removeprefix("last:")
            count = round(float(number) * num_layers) if "." in number else int(number)
            if not 1 <= count <= num_layers:
                raise ValueError(f"layers: {self.layers} asks for {count} of {num_layers} layers")
            return tuple(range(num_layers - count, num_layers))
        chosen = tuple(sorted(set(self.layers)))
        if chosen[-1] >= num_layers:
            raise ValueError(f"layers: {list(self.layers)}; the model has layers 0 to {num_layers - 1}")
        return chosen


class FlatLLMRanks(Block):
    """Ranks given outright, the same in every layer, instead of a budget."""

    value: PositiveInt | None = None
    mlp: PositiveInt | None = None
    query_key: PositiveInt | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and self.mlp is None and self.query_key is None:
            raise ValueError("should give at least one of value, mlp, query_key")
        return self


class FlatLLM(MethodEntry):
    """FLAT-LLM, docs/methods.md#flat-llm. Defaults are ours.

    The paper's are basis: value, weighting: none, selection: leverage. `uniform`: one rank and one width for all
    layers, as an ordinary checkpoint has them (`export --to stock`); by loss where ranks follow it.
    """

    method: Literal["flat_llm"]
    attention: bool = True
    mlp: bool = True
    allocation: Literal["importance", "uniform", "loss"] = "importance"
    basis: Literal["value", "context"] = "context"
    weighting: Literal["none", "output", "loss"] = "output"
    selection: Literal["leverage", "eliminate"] = "eliminate"
    query_key: Literal["none", "head_pca"] = "none"
    ridge: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    uniform: bool = False
    ranks: FlatLLMRanks | None = None

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.attention or self.mlp or self.query_key != "none"):
            raise ValueError("attention, mlp and query_key are all off: the method would claim nothing")
        if self.ranks is not None and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both")
        if self.allocation == "loss" and self.query_key != "none":
            raise ValueError("query_key: head_pca has no prediction of the loss; leave it out of allocation: loss")
        if self.uniform and (self.layers != "all" or self.ranks is not None):
            raise ValueError("uniform goes with layers: all, and with a budget; `ranks` are the same in every layer")
        if self.allocation == "loss" and self.ranks is not None:
            raise ValueError("give `ranks` or allocation: loss, not both")
        return self


class LoRC(MethodEntry):
    """LoRC, docs/methods.md#lorc: the cache holds latents. `cache_keep`: the mean share of it; null: by the budget."""

    method: Literal["lorc"]
    key: bool = True
    value: bool = True
    cache_keep: Share | None = None
    allocation: Literal["progressive", "uniform", "loss"] = "uniform"
    weighting: Literal["none", "input", "loss"] = "none"
    skip_above: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _thresholds_mean_progressive(cls, entry: Any) -> Any:
        """`skip_above` compares condition numbers, as only progressive ranks do."""
        if isinstance(entry, Mapping) and entry.get("skip_above") is not None and "allocation" not in entry:
            return {**entry, "allocation": "progressive"}
        return entry

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.key or self.value):
            raise ValueError("key and value are both off: the method would claim nothing")
        if self.cache_keep is not None and self.keep is not None:
            raise ValueError("give `cache_keep` or `keep`, not both")
        if self.skip_above is not None and self.allocation != "progressive":
            raise ValueError("skip_above goes with allocation: progressive, which knows the condition numbers")
        return self


class JointRanks(Block):
    """Ranks given outright, the same in every chosen layer."""

    query_key: PositiveInt | None = None
    mlp: PositiveInt | None = None


class JointRankK(MethodEntry):
    """Joint rank-k, docs/methods.md#joint-rank-k. `mlp` true means joint."""

    method: Literal["joint_rank_k"]
    query_key: Literal["joint", "separate", "joint_per_head", "none"] = "joint"
    mlp: bool | Literal["joint", "separate", "none"] = True
    allocation: Literal["uniform", "loss"] = "uniform"
    weighting: Literal["none", "input", "loss"] = "none"
    ranks: JointRanks | None = None

    @property
    def mlp_form(self) -> str:
        """joint, separate or none."""
        return self.mlp if isinstance(self.mlp, str) else ("joint" if self.mlp else "none")

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if self.query_key == "none" and self.mlp_form == "none":
            raise ValueError("query_key and mlp are both off: the method would claim nothing")
        if self.ranks is not None and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both")
        if self.ranks is not None:
            wanted = {"query_key": self.query_key != "none", "mlp": self.mlp_form != "none"}
            missing = [name for name, claimed in wanted.items() if claimed and getattr(self.ranks, name) is None]
            if missing:
                raise ValueError(f"ranks: {', '.join(missing)} missing, although it is claimed")
        if self.ranks is not None and self.allocation == "loss":
            raise ValueError("give `ranks` or allocation: loss, not both")
        if self.query_key == "joint_per_head" and self.needs_gradient:
            raise ValueError("query_key: joint_per_head has no prediction of the loss; use joint or separate")
        return self


class LeSTD(MethodEntry):
    """LeSTD, docs/methods.md#lestd: shared-subspace Tucker with a sparse core. `ranks` [R1, R2, R3]; null: searched.

    `prune` false keeps the core dense. `refine_sweeps` turn the factors to fit the sparse core, which is beyond the
    paper (0: its algorithm). `threshold: model` cuts all layers' cores at one magnitude. `core`: in memory, served.
    """

    method: Literal["lestd"]
    target: Literal["attention", "mlp", "both"] = "attention"
    ranks: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt] | None, Listed] = None
    prune: bool = True
    weighting: Literal["none", "input"] = "none"
    sweeps: PositiveInt = 10
    tolerance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-6
    allocation: Literal["uniform", "loss"] = "uniform"
    threshold: Literal["layer", "model"] = "layer"
    refine_sweeps: Annotated[int, Field(ge=0)] = 10
    core: Literal["dense", "csr"] = "dense"

    @property
    def fixed(self) -> bool:
        """Whether the ranks alone say what is stored."""
        return self.ranks is not None and not self.prune

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.fixed and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both: a core that is not pruned has the size of its ranks")
        if self.ranks is not None and self.target == "both":
            raise ValueError(
                "ranks: attention (d wide) and MLP (as wide as its inner layer) need ranks of their own; "
                "give two entries, with target: attention and target: mlp"
            )
        if self.weighting == "input" and self.target != "attention":
            raise ValueError(
                "weighting: input goes with target: attention, where q, k and v read the same input; in the MLP's "
                "tensor down reads another input than its neighbours"
            )
        if self.threshold == "model" and self.weighting == "input":
            raise ValueError(
                "threshold: model compares cores of all layers before calibration text has passed any of them, so it "
                "does not go with weighting: input; use threshold: layer"
            )
        if self.allocation == "loss" and (self.threshold == "model" or self.fixed):
            raise ValueError(
                "allocation: loss gives each layer a size of its own; leave out threshold: model, and fixed `ranks`"
            )
        if self.threshold == "model" and not self.prune:
            raise ValueError("threshold: model goes with prune: true; a dense core is cut at no threshold")
        return self


class LossAware(MethodEntry):
    """Ranks, metrics and forms by what the loss feels, docs/methods.md#loss-aware. Ranks follow predicted loss, always.

    `correct: output` solves a layer behind the compressed ones, against what the dense model has more at that place.
    `weighting: input` solves without the gradient; the ranks still follow it. `widths`: how many widths of an MLP are
    compared. `factors: plain` stores two factors where `pivoted` stores rows of the matrix and what makes the others.
    """

    method: Literal["loss_aware"]
    query_key: bool = True
    attention: bool = True
    mlp: bool = True
    factors: Literal["pivoted", "plain"] = "pivoted"
    correct: Literal["none", "output"] = "none"
    weighting: Literal["loss", "input"] = "loss"
    widths: PositiveInt = 8

    @property
    def follows_curves(self) -> bool:
        """Always."""
        return True

    @model_validator(mode="before")
    @classmethod
    def _drops_rounds(cls, fields: Any) -> Any:
        """Older manifests say `rounds: 1`, which is all that is left."""
        if not isinstance(fields, Mapping) or "rounds" not in fields:
            return fields
        if fields["rounds"] != 1:
            raise ValueError(
                f"rounds: {fields['rounds']!r} is no longer supported; correct: output gives more for less time. "
                "Leave out rounds"
            )
        return {name: value for name, value in fields.items() if name != "rounds"}

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if not (self.query_key or self.attention or self.mlp):
            raise ValueError("query_key, attention and mlp are all off: the method would claim nothing")
        return self


class SVD(MethodEntry):
    """A baseline: every weight by itself, by its singular values; data-free. docs/methods.md#baselines."""

    method: Literal["svd"]


class ASVD(MethodEntry):
    """A baseline: as `svd`, with the inputs scaled by their size to the power `alpha`. docs/methods.md#baselines."""

    method: Literal["asvd"]
    alpha: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.5


class SVDLLM(MethodEntry):
    """A baseline: as `svd`, with the inputs whitened by their second moment. docs/methods.md#baselines."""

    method: Literal["svd_llm"]


OfPaper = FlatLLM | LoRC | JointRankK | LeSTD
OfSingularValues = SVD | ASVD | SVDLLM


class Magnitude(MethodEntry):
    """A baseline: channels of the MLP stay by the size of their weights; data-free. docs/methods.md#baselines."""

    method: Literal["magnitude"]


AnyMethod = Annotated[OfPaper | LossAware | OfSingularValues | Magnitude, Field(discriminator="method")]
