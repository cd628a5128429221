"""LoRC: caches latents instead of keys and values, with progressive ranks. docs/methods.md#lorc.

Legend: D hidden, H query heads, G key/value heads, d head_dim, C = G·d, r latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from manifests.methods import LoRC
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, Matrix, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.heads import project_heads, repeat_groups
from pipeline.kernels.lowrank import log_condition, low_rank
from pipeline.kernels.spectra import dropped_share, spectrum
from pipeline.methods.base import Group, Method
from pipeline.methods.by_loss import LowRank, curve_of, moments_of
from pipeline.methods.method import Ranks, Scores, Solution, Task, group_key
from pipeline.ranks.budget import RankKey, RankVariable, fit_ranks, solve_ratio
from pipeline.ranks.curves import Point, most_numbers
from pipeline.ranks.progressive import cumulative_log_conditions, progressive_shares

KEY, VALUE = "key", "value"  # names of groups and of their rank variables
CONDITION = "condition"
_ROUNDING = 1e-9  # rounding error of a mean of shares


class Latents(LowRank[LoRC]):
    """Keys, cached as latents. The group and its rank have the same name."""

    @property
    def matrix(self) -> Matrix:
        """Return the matrix of keys or of values."""
        return self.matrices[0]

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a rank, at most min(C, D). At rank C the group stays dense."""
        return (self.variable(self.name, min(self.matrix.shape), self._cost),)

    def curve(self) -> Curve:
        """Predict the loss at each rank, with the numbers that a token caches."""
        by_rank, (variable,) = self.losses((self.matrix,), [self.weight(self.matrix)]), self.variables()
        return curve_of(
            variable,
            lambda rank: 0.0 if self._stays_dense(rank) else float(by_rank[min(rank, self.geometry.hidden)]),
            lambda rank: _cached(self.geometry) if self._stays_dense(rank) else rank,
        )

    def corners(self) -> list[Point]:
        """Return cached and stored numbers at a few ranks; both are linear between these ranks."""
        head_dim, full, (variable,) = self.geometry.attention.head_dim, self._full, self.variables()
        ends = (1, head_dim, head_dim + 1, variable.cap - 1, variable.cap)
        ranks = sorted({rank for rank in ends if 1 <= rank <= variable.cap})
        return [Point({}, variable.cost(rank), 0.0, full if rank >= full else rank) for rank in ranks]

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map k to `latent`, or leave it out if it stays dense."""
        rank = ranks[self.name]
        return {} if self._stays_dense(rank) else {self.roles[0]: FormSpec(form="latent", rank=rank)}

    def measure(self) -> dict[str, list[float]]:
        """Return ln κ of each matrix."""
        return {"log_condition": [log_condition(self.weights[f"{role}.weight"])[0] for role in self.roles]}

    def solve(self, ranks: Ranks) -> Solution:
        """Factor k or v: first (r × D) gives the latents; second (C × r) rebuilds the heads, or W_o absorbs it."""
        role, forms = self.roles[0], self.forms(ranks)
        if not forms:
            return self.dense()
        first_rD, second_Cr, report = self._latent(ranks[self.name])
        tensors = {f"{role}.first.weight": first_rD}
        if len(forms) > 1:
            tensors |= _absorbed_output(self.geometry.attention, self.weights, second_Cr)
            return Solution(tensors, forms, report | {"absorbed": True})
        tensors[f"{role}.second.weight"] = second_Cr
        tensors |= {name: weight for name, weight in self.weights.items() if name != self.matrix.weight_key}
        return Solution(tensors, forms, report)

    def _latent(self, rank: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return first (r, D), second (C, r) and figures for the report."""
        if self.entry.weighting == "loss":
            first_rD, (second_Cr,), predicted = self.factors_by_loss((self.matrix,), rank)
            return first_rD, second_Cr, {"predicted": predicted}
        roots = self.roots
        first_rD, second_Cr, values = low_rank(self.weight(self.matrix), rank, roots)
        report = {"error": dropped_share(values.square(), rank), "spectrum": spectrum(values.square())}
        return first_rD, second_Cr, report | ({"clipped": roots.clipped} if roots else {})

    def _stays_dense(self, rank: int) -> bool:
        """Return True at full rank and, under a budget of stored numbers, if the factors would save none."""
        saves = self.entry.cache_keep is not None or self._factored(rank) < self._dense_numbers
        return rank >= self._full or not saves

    @property
    def _full(self) -> int:
        """Return the smallest rank at which the group stays dense.

        With `cache_keep` this is C, because if D < C latents of D numbers are exact and smaller.
        """
        return _cached(self.geometry) if self.entry.cache_keep is not None else min(self.matrix.shape)

    def _cost(self, rank: float) -> float:
        if rank >= self._full:
            return self._dense_numbers
        factored = self._factored(rank)
        return factored if self.entry.cache_keep is not None else min(factored, self._dense_numbers)

    @property
    def _dense_numbers(self) -> float:
        return self.geometry.numbers(self.roles)

    def _factored(self, rank: float) -> float:
        """Count the numbers stored with latents."""
        return rank * (self.geometry.hidden + _cached(self.geometry)) + self.bias_numbers


class ValueLatents(Latents):
    """Values with the output projection, which absorbs the second factor of the values if that is smaller."""

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map v to `latent`, and o to `absorbed` if W_o absorbs v's second factor."""
        rank, (value, writer) = ranks[self.name], self.roles
        if self._stays_dense(rank):
            return {}
        absorbs = _absorbs(self.geometry.attention, rank)
        latent = {value: FormSpec(form="latent", rank=rank, absorbed=absorbs)}
        return latent | ({writer: FormSpec(form="absorbed", rank=rank)} if absorbs else {})

    def _factored(self, rank: float) -> float:
        """Count the numbers stored with latents."""
        block, D = self.geometry.attention, self.geometry.hidden
        if _absorbs(block, rank):
            return rank * (D + block.heads * D) + block.writer.biases
        return super()._factored(rank) + block.heads * D * block.head_dim


@dataclass(frozen=True)
class LoRCMethod(Method[LoRC]):
    """`method: lorc` with the settings of its manifest entry."""

    name: ClassVar[str] = "lorc"

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry sets a share of the cache, so that no budget of stored numbers applies."""
        return self.entry.cache_keep is not None

    def groups(self, layer: LayerGeometry) -> Iterator[Latents]:
        """Claim groups `key` (k) and `value` (v, o). Raises ValueError on a share of the cache below the smallest
        rank."""
        self._check(layer)
        block = layer.attention
        if self.entry.key:
            yield Latents(self.entry, layer, KEY, (block.key.role,), moments_of(self.entry, [(block.key,)]))
        if self.entry.value:
            roles, moments = roles_of(block.value_output), moments_of(self.entry, [(block.value,)])
            yield ValueLatents(self.entry, layer, VALUE, roles, moments)

    def _check(self, layer: LayerGeometry) -> None:
        keep, least = self.entry.cache_keep, min(self.entry.multiple(layer.hidden), *layer.attention.key.shape)
        if keep is not None and keep * _cached(layer) < least:
            raise ValueError(
                f"cache_keep: {keep:g} of {_cached(layer)} cached numbers is less than the smallest rank, {least}; "
                f"give at least {least / _cached(layer):.4f}, or a smaller rank_multiple"
            )

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return `cache_keep` times the claimed part of the dense cache."""
        share = self.entry.cache_keep
        return None if share is None else share * sum(_cached(group.geometry) for group in self.claims(geometry))

    def most_numbers(self, geometry: Geometry) -> float:
        """Bound the numbers stored at any ranks that cache no more than `cache_keep`."""
        target = self.cache_target(geometry)
        if target is None:
            return super().most_numbers(geometry)
        return most_numbers([group.corners() for group in self.chosen(geometry, self.groups)], target)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return ranks by eq. 13 (progressive), or the same share in every layer.

        Their mean is `cache_keep` of the dense cache if that is set, else `ratio` of the cap. No latent is wider than
        D; a layer's excess is shared among the others.
        """
        keep, variables = self.entry.cache_keep, self.rank_variables(geometry)
        layers = self.chosen_layers(geometry)
        if keep is None:
            shares = self._shares(geometry, ratio, dict.fromkeys((layer.index for layer in layers), 1.0), scores)
            return {
                variable.key: shares[variable.layer] * min(geometry.layers[variable.layer].attention.key.shape)
                for variable in variables
            }
        most = {layer.index: _exact_share(layer) for layer in layers}
        shares = self._shares(geometry, keep, most, scores)
        if keep < 1.0 and min(most.values()) < 1.0:  # share the excess of layers at their limit among the others
            part = solve_ratio(
                lambda part: fmean(self._shares(geometry, keep + part * (1.0 - keep), most, scores).values()),
                keep + _ROUNDING,
            )
            shares = self._shares(geometry, keep + part * (1.0 - keep), most, scores)
        cached = {layer.index: _cached(layer) for layer in layers}
        targets = {variable.key: shares[variable.layer] * cached[variable.layer] for variable in variables}
        return _cache_ranks(variables, targets, cached, keep)

    def _shares(self, geometry: Geometry, mean: float, most: Mapping[int, float], scores: Scores) -> dict[int, float]:
        """Map each layer to its share. The shares have this mean before they are limited to `most`; dense layers are
        not limited."""
        layers = self.entry.chosen_layers(geometry.num_layers)
        if mean == 1.0 == self.entry.cache_keep:
            return dict.fromkeys(layers, 1.0)
        if self.entry.allocation == "uniform":
            return {layer: min(mean, most[layer]) for layer in layers}
        cumulative = cumulative_log_conditions(_log_conditions(geometry, scores))
        progressive = progressive_shares([cumulative[layer] for layer in layers], mean, self.entry.skip_above)
        skipped = {layers[position] for position in progressive.skipped}
        return {
            layer: share if layer in skipped else min(share, most[layer])
            for layer, share in zip(layers, progressive.shares, strict=True)
        }

    def remarks(self, geometry: Geometry) -> tuple[str, ...]:
        """Explain a cache share that is not reached because smaller latents are exact, and the cost of decoding."""
        return tuple(dict.fromkeys(remark for layer in self.chosen_layers(geometry) for remark in self._remarks(layer)))

    def _remarks(self, geometry: LayerGeometry) -> Iterator[str]:
        keep, most = self.entry.cache_keep, _exact_share(geometry)
        if keep is not None and most < keep < 1.0:
            yield (
                f"cache_keep: {keep:g} is not reached: latents of {geometry.hidden} numbers, as wide as the hidden "
                f"state, already give all {_cached(geometry)} cached ones exactly; it becomes {most:.4g}, without loss"
            )
        if self.entry.key and keep != 1.0:
            rank, cached = round(min(keep or 1.0, most) * _cached(geometry)), _cached(geometry)
            bound = "up to " if keep is None else ""
            yield (
                f"keys of rank {bound}{rank:,} take {bound}{rank * cached:,} products for each cached token and layer "
                f"of a decoding step. This is faster than reading dense keys on devices with more than "
                f"{rank / (geometry.bits / 8):,.0f} operations per byte (a GPU has about 300, a CPU 10), and slower on "
                "others; the cache is smaller on all (docs/methods.md#when-latents-pay)"
            )

    def measures(self, geometry: Geometry) -> tuple[Latents, ...]:
        """Measure W_k and W_v of all layers, because progressive ranks follow κ̃_l, a product over depth.

        Return none if the whole cache is kept.
        """
        if self.entry.allocation != "progressive" or self.entry.cache_keep == 1.0:
            return ()
        return tuple(self._condition(layer) for layer in geometry.layers)

    def _condition(self, layer: LayerGeometry) -> Latents:
        return Latents(self.entry, layer, CONDITION, roles_of((layer.attention.key, layer.attention.value)))

    def group(self, task: Task, layer: LayerGeometry) -> Group[Any]:
        """Return the group of a task."""
        return self._condition(layer) if task.name == CONDITION else super().group(task, layer)


def _cache_ranks(
    variables: Sequence[RankVariable], targets: Mapping[RankKey, float], dense: Mapping[int, int], keep: float
) -> dict[RankKey, float]:
    """Return allowed ranks near the targets that cache no more than the targets do together.

    A group whose target is its layer's `dense` numbers stays dense. If layers differ in size, shares with mean `keep`
    do not add up to `keep` of the cache; then the total is set to it.
    """
    latent = [
        replace(variable, cost=lambda rank: rank)
        for variable in variables
        if targets[variable.key] < dense[variable.layer] - _ROUNDING
    ]
    total = sum(targets[variable.key] for variable in latent)
    if len(set(dense.values())) > 1:
        latent_keys = {variable.key for variable in latent}
        whole = sum(dense[variable.layer] for variable in variables)
        total = keep * whole - sum(dense[variable.layer] for variable in variables if variable.key not in latent_keys)
    ranks = fit_ranks(latent, targets, total + _ROUNDING)
    return {variable.key: float(ranks.get(variable.key, dense[variable.layer])) for variable in variables}


def _cached(geometry: LayerGeometry) -> int:
    """Return C, the numbers that the dense cache holds per token, of keys or of values."""
    return geometry.attention.key.outputs


def _exact_share(geometry: LayerGeometry) -> float:
    """Return min(C, D) / C, the widest latent's share of the dense cache."""
    return min(geometry.attention.key.shape) / _cached(geometry)


def _log_conditions(geometry: Geometry, scores: Scores) -> list[list[float]]:
    """Return ln κ of W_k and W_v by layer."""
    layers = range(geometry.num_layers)
    if scores.measured is None:
        return [[1.0, 1.0] for _ in layers]
    return [scores.measured[group_key(layer, CONDITION)]["log_condition"] for layer in layers]


def _absorbs(block: AttentionBlock, rank: float) -> bool:
    """Return True if W_o absorbs the second factor, which it does if latents are no wider than a value head.

    W_o then has D·r numbers per query head, fewer than the second factor and W_o together, and a token takes fewer
    products. Heads of r <= d numbers move no more data than before. Slightly wider latents would still store less, but
    a prefill pads queries and keys to their width. If v has a bias, W_o needs a bias to absorb it, and attention
    weights must sum to 1.
    """
    absorbs_bias = not block.value.bias or (block.writer.bias and not block.sinks)
    return absorbs_bias and rank <= block.head_dim


def _absorbed_output(block: AttentionBlock, weights: Mapping[str, Tensor], second_Cr: Tensor) -> dict[str, Tensor]:
    """Return W̃_o^h = W_o^h B^{g(h)}, (D, H·r). v's bias passes the softmax unchanged and is added to o's."""
    H, G, (value, writer) = block.heads, block.kv_heads, block.value_output
    output_DF = weights[writer.weight_key].double()
    tensors = {writer.weight_key: project_heads(output_DF, repeat_groups(second_Cr.double().unflatten(0, (G, -1)), H))}
    if writer.bias:
        tensors[writer.bias_key] = weights[writer.bias_key].double()
    if value.bias:
        bias_Hd = repeat_groups(weights[value.bias_key].double().reshape(G, -1), H)
        moved_D = project_heads(output_DF, bias_Hd[..., None]).T.contiguous().sum(0)
        tensors[writer.bias_key] = tensors[writer.bias_key] + moved_D
    return tensors
