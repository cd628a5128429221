"""The entries under `methods`: one pydantic model for each method. docs/manifest.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from manifests.blocks import Count, Listed, ManifestBlock, Ridge, Share
from manifests.method_entry import MethodEntry, Refine

FORMER_RIDGES = [1e-3, 1e-4]  # of jobs begun before `correct_ridges` was a field


class FlatLLMRanks(ManifestBlock):
    """Fixed ranks, the same in every layer, instead of a budget."""

    value: Count | None = None
    mlp: Count | None = None
    query_key: Count | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and self.mlp is None and self.query_key is None:
            raise ValueError("should give at least one of value, mlp, query_key")
        return self


class FlatLLM(MethodEntry):
    """FLAT-LLM, docs/methods.md#flat-llm.

    Defaults are Lamina's. The paper's are basis: value, weighting: none, selection: leverage. `uniform`: one rank and
    one width for all layers, as ordinary checkpoints need (`export --to stock`); with allocation: loss, chosen by loss.
    `attention`, `mlp`: compress value and output projections, and the MLP's channels. `query_key: head_pca`: also the
    PCA of each head's queries and keys. `ridge`: of the leverage scores, relative to the mean square of the channels.
    """

    method: Literal["flat_llm"]
    attention: bool = True
    mlp: bool = True
    allocation: Literal["importance", "uniform", "loss"] = "importance"
    basis: Literal["value", "context"] = "context"
    weighting: Literal["none", "output", "loss"] = "output"
    selection: Literal["leverage", "eliminate"] = "eliminate"
    query_key: Literal["none", "head_pca"] = "none"
    ridge: Ridge = 1.0
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
    """LoRC, docs/methods.md#lorc: the cache holds latents. `cache_keep`: their mean share of it; null: by budget.

    `key`, `value`: what is compressed. `allocation`: the same share in every layer, more in shallow layers by condition
    numbers (the paper's `progressive`), or by predicted loss. `weighting`: errors count as in the weights (`none`), at
    the outputs (`input`: by the moments of the inputs), or by the gradient of the loss. `skip_above`: layers whose
    cumulative condition number has a larger decimal logarithm stay dense.
    """

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
        # `skip_above` compares condition numbers, which only progressive ranks compute.
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


class MLA(MethodEntry):
    """Latent attention, docs/methods.md#mla: OUTPUT is a plain directory of the DeepSeek type.

    `cache_keep`: the numbers that a token caches in each layer, latents and rotated key dimensions, as a share of the
    source's. `rope`: the rotated ones; null: by predicted loss, as is always the density of their frequencies.
    """

    method: Literal["mla"]
    cache_keep: Share
    rope: Count | None = None

    @property
    def follows_curves(self) -> bool:
        """True: sizes always follow predicted loss."""
        return True

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.layers != "all" or self.keep is not None:
            raise ValueError("the class has one size for all layers; leave out layers and keep")
        if self.refine is not None:
            raise ValueError("layers of the DeepSeek type are not trained; leave out refine")
        if self.rope is not None and self.rope % 2:
            raise ValueError(f"rope: {self.rope} is odd; dimensions are rotated in pairs")
        return self


class JointRanks(ManifestBlock):
    """Fixed ranks, the same in every chosen layer."""

    query_key: Count | None = None
    mlp: Count | None = None


class JointRankK(MethodEntry):
    """Joint rank-k, docs/methods.md#joint-rank-k. `mlp` true means joint.

    `joint`: queries and keys, or gate and up, share their first factor; `separate`: each has two factors;
    `joint_per_head`: a first factor for each head. `allocation`, `weighting`: as in `lorc`.
    """

    method: Literal["joint_rank_k"]
    query_key: Literal["joint", "separate", "joint_per_head", "none"] = "joint"
    mlp: bool | Literal["joint", "separate", "none"] = True
    allocation: Literal["uniform", "loss"] = "uniform"
    weighting: Literal["none", "input", "loss"] = "none"
    ranks: JointRanks | None = None

    @property
    def mlp_form(self) -> str:
        """The form of the MLP: joint, separate or none."""
        return self.mlp if isinstance(self.mlp, str) else ("joint" if self.mlp else "none")

    @model_validator(mode="after")
    def _claims_something(self) -> Self:
        if self.query_key == "none" and self.mlp_form == "none":
            raise ValueError("query_key and mlp are both off: the method would claim nothing")
        if self.ranks is not None and self.keep is not None:
            raise ValueError("give `ranks` or `keep`, not both")
        if self.ranks is not None:
            claims = {"query_key": self.query_key != "none", "mlp": self.mlp_form != "none"}
            missing = [name for name, claimed in claims.items() if claimed and getattr(self.ranks, name) is None]
            if missing:
                raise ValueError(f"ranks: {', '.join(missing)} missing, although it is claimed")
        if self.ranks is not None and self.allocation == "loss":
            raise ValueError("give `ranks` or allocation: loss, not both")
        if self.query_key == "joint_per_head" and self.needs_gradient:
            raise ValueError("query_key: joint_per_head has no prediction of the loss; use joint or separate")
        return self


class LeSTD(MethodEntry):
    """LeSTD, docs/methods.md#lestd: shared-subspace Tucker with a sparse core.

    `ranks`: [R1, R2, R3]; null: searched. `prune: false` keeps the core dense. `refine_sweeps`: passes that fit the
    factors to the sparse core; the paper has none (0). `threshold: model` prunes the cores of all layers at one
    magnitude. `core`: the layout of a sparse core in memory when the model is served. `target`: the matrices that are
    stacked into a tensor. `sweeps`, `tolerance`: HOOI ends after so many sweeps, or when one gains at most this share.
    """

    method: Literal["lestd"]
    target: Literal["attention", "mlp", "both"] = "attention"
    ranks: Annotated[tuple[Count, Count, Count] | None, Listed] = None
    prune: bool = True
    weighting: Literal["none", "input"] = "none"
    sweeps: Count = 10
    tolerance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-6
    allocation: Literal["uniform", "loss"] = "uniform"
    threshold: Literal["layer", "model"] = "layer"
    refine_sweeps: Annotated[int, Field(ge=0, le=10**9)] = 10
    core: Literal["dense", "csr"] = "dense"

    @property
    def fixed(self) -> bool:
        """True if the ranks alone determine the size."""
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
    """Low rank by gradients of the model's loss, docs/methods.md#loss-aware. Ranks always follow predicted loss.

    `correct: output` solves each layer on the outputs of the compressed layers before it, to compensate their error.
    `correct_ridges` keep these fits near the weights before them: the penalties of a change, relative to the mean
    square of the inputs, for what reads the residual stream and for what writes to it.
    `query_key`, `attention`, `mlp`: the groups that are compressed; `attention` is values and output projections.
    `weighting: input` solves without gradients; the ranks still follow them. `widths`: the number of MLP widths that
    are compared. `factors: pivoted` stores rows of the matrix and the coefficients of the others; `plain`, two factors.
    `shapes`, of mixtures: `free` gives every expert its own width and ranks; `layer` and `stock` keep some experts, in
    one number and width for each layer or for all, narrow the latents of DeepSeek's attention alike, and claim nothing
    else.
    """

    method: Literal["loss_aware"]
    query_key: bool = True
    attention: bool = True
    mlp: bool = True
    factors: Literal["pivoted", "plain"] = "pivoted"
    correct: Literal["none", "output"] = "none"
    correct_ridges: Annotated[tuple[Ridge, Ridge], Listed] = (0.1, 0.3)
    weighting: Literal["loss", "input"] = "loss"
    widths: Count = 8
    shapes: Literal["free", "layer", "stock"] = "free"

    @property
    def follows_curves(self) -> bool:
        """True: ranks always follow predicted loss."""
        return True

    def deciding_multiple(self, hidden_size: int) -> int | None:
        """Return the number that decides sizes; None for shapes of experts, unless `rank_multiple` is set."""
        return self.multiple(hidden_size) if self.shapes == "free" else self.rank_multiple

    @model_validator(mode="before")
    @classmethod
    def _drops_rounds(cls, fields: Any) -> Any:
        # Older manifests say `rounds: 1`, the only value that is still supported.
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
        if self.shapes != "free" and (self.correct != "none" or self.refine is not None):
            raise ValueError(f"shapes: {self.shapes} has no correction and no refinement; leave out correct and refine")
        return self


class SVD(MethodEntry):
    """A baseline: truncated SVD of every weight; data-free. docs/methods.md#baselines."""

    method: Literal["svd"]


class ASVD(MethodEntry):
    """A baseline: `svd`, with the inputs scaled by their size to the power `alpha`. docs/methods.md#baselines."""

    method: Literal["asvd"]
    alpha: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.5


class SVDLLM(MethodEntry):
    """A baseline: `svd`, with the inputs whitened by their second moment. docs/methods.md#baselines."""

    method: Literal["svd_llm"]


OfPaper = FlatLLM | LoRC | MLA | JointRankK | LeSTD
OfSingularValues = SVD | ASVD | SVDLLM


class Magnitude(MethodEntry):
    """A baseline: keeps the MLP's channels of largest weights; data-free. docs/methods.md#baselines."""

    method: Literal["magnitude"]


def _not_refined(refine: Refine | None) -> None:
    if refine is not None:
        raise ValueError("a layer with fewer experts is not trained; leave out refine")


class REAP(MethodEntry):
    """A baseline: removes whole experts, those with the least mean p‖f(m)‖. docs/methods.md#mixtures.

    `refit`: fit the outputs of the remaining experts to the output of all.
    """

    method: Literal["reap"]
    refit: bool = False

    _is_not_refined = field_validator("refine")(_not_refined)


class Frequency(MethodEntry):
    """A baseline: removes whole experts, those with the fewest tokens. docs/methods.md#mixtures.

    `refit`: fit the outputs of the remaining experts to the output of all.
    """

    method: Literal["frequency"]
    refit: bool = False

    _is_not_refined = field_validator("refine")(_not_refined)


class MergeExperts(MethodEntry):
    """A baseline: merges the experts with the nearest mean outputs into one. docs/methods.md#mixtures.

    `refit`: fit the outputs of the merged experts to the output of all.
    """

    method: Literal["merge_experts"]
    refit: bool = False

    _is_not_refined = field_validator("refine")(_not_refined)


OfExperts = REAP | Frequency | MergeExperts


class HEAPr(MethodEntry):
    """A baseline: removes the channels of MLPs and experts that cost the least loss. docs/methods.md#baselines.

    `refit`: fit the writers of the remaining channels to the output of all.
    """

    method: Literal["heapr"]
    refit: bool = False

    @property
    def follows_curves(self) -> bool:
        """True: widths always follow predicted loss."""
        return True


OneMethod = OfPaper | LossAware | OfSingularValues | Magnitude | HEAPr | OfExperts
AnyMethod = Annotated[OneMethod, Field(discriminator="method")]
