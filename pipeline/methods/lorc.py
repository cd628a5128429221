"""LoRC: caches latents instead of keys and values, with progressive ranks. docs/methods.md#lorc.

Legend: D hidden, H query heads, G key/value heads, d head_dim, C = G·d, r latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from manifests.methods import LoRC
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, Matrix, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.heads import project_heads, repeat_groups
from pipeline.kernels.lowrank import input_roots, log_condition, low_rank
from pipeline.kernels.sensitivity import losses_by_rank
from pipeline.kernels.spectra import dropped_share, spectrum
from pipeline.methods.base import MethodBase
from pipeline.methods.by_loss import curve_of, directions, factors, losses
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights, group_key
from pipeline.methods.moments import input_moment, pull
from pipeline.ranks.budget import RankVariable, fit_ranks, solve_ratio
from pipeline.ranks.curves import Point, most_numbers
from pipeline.ranks.progressive import cumulative_log_conditions, progressive_shares

KEY, VALUE = "key", "value"  # names of groups and of their rank variables
CONDITION = "condition"
_ROUNDING = 1e-9  # rounding error of a mean of shares


@dataclass(frozen=True)
class LoRCMethod(MethodBase[LoRC]):
    """`method: lorc` with the settings of its manifest entry."""

    name: ClassVar[str] = "lorc"

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry sets a share of the cache, so that no budget of stored numbers applies."""
        return self.entry.cache_keep is not None

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim groups `key` (k) and `value` (v, o) of every chosen layer.

        Raises ValueError on layers that do not exist, and on a share of the cache below the smallest rank.
        """
        layers = self.chosen_layers(geometry)
        for layer in layers:
            self._check(layer)
        names = [name for name in (KEY, VALUE) if getattr(self.entry, name)]
        return tuple(
            Group(layer.index, name, roles_of(matrices), self._moments(matrices[0]))
            for layer in layers
            for name in names
            for matrices in (_matrices(layer.attention, name),)
        )

    def _check(self, layer: LayerGeometry) -> None:
        keep, least = self.entry.cache_keep, min(self.entry.multiple(layer.hidden), *layer.attention.key.shape)
        if keep is not None and keep * _cached(layer) < least:
            raise ValueError(
                f"cache_keep: {keep:g} of {_cached(layer)} cached numbers is less than the smallest rank, {least}; "
                f"give at least {least / _cached(layer):.4f}, or a smaller rank_multiple"
            )

    def _moments(self, matrix: Matrix) -> tuple[Moment, ...]:
        if self.entry.needs_gradient:
            return input_moment(matrix), pull((matrix,))
        return (input_moment(matrix),) if self.entry.weighting == "input" else ()

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return `cache_keep` times the claimed part of the dense cache."""
        share = self.entry.cache_keep
        cached = sum(_cached(geometry.layers[group.layer]) for group in self.claims(geometry))
        return None if share is None else share * cached

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss at each rank, with the numbers that a token caches."""
        matrix = geometry.matrices[group.roles[0]]
        input_DD, pull_DD = statistics.mean(input_moment(matrix))[0], statistics.mean(pull((matrix,)))[0]
        by_rank = losses([weights[matrix.weight_key]], self.entry.weighting, input_DD, pull_DD)

        def dense(rank: int) -> bool:
            return self._stays_dense(geometry, group.name, rank)

        (variable,) = self.group_variables(group, geometry)
        return curve_of(
            variable,
            lambda rank: 0.0 if dense(rank) else float(by_rank[min(rank, geometry.hidden)]),
            lambda rank: _cached(geometry) if dense(rank) else rank,
        )

    def most_numbers(self, geometry: Geometry) -> float:
        """Bound the numbers stored at any ranks that cache no more than `cache_keep`."""
        lines = [self._corners(variable, geometry.layers[variable.layer]) for variable in self.rank_variables(geometry)]
        target = self.cache_target(geometry)
        return super().most_numbers(geometry) if target is None else most_numbers(lines, target)

    def _corners(self, variable: RankVariable, geometry: LayerGeometry) -> list[Point]:
        """Return cached and stored numbers at a few ranks; both are linear between these ranks."""
        head_dim = geometry.attention.head_dim
        ends = (1, head_dim, head_dim + 1, variable.cap - 1, variable.cap)
        ranks = sorted({rank for rank in ends if 1 <= rank <= variable.cap})
        full = self._full(geometry)
        return [Point({}, variable.cost(rank), 0.0, full if rank >= full else rank) for rank in ranks]

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose a rank for `key` and one for `value`, at most min(C, D). At rank C the group stays dense."""
        cap, multiple = min(geometry.attention.key.shape), self.entry.multiple(geometry.hidden)
        cost = partial(self._cost, geometry, group.name)
        return (RankVariable(group.layer, group.name, group.name, cap, multiple, cost),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
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

    def measures(self, geometry: Geometry) -> tuple[Group, ...]:
        """Measure W_k and W_v of all layers, because progressive ranks follow κ̃_l, a product over depth.

        Return none if the whole cache is kept.
        """
        if self.entry.allocation != "progressive" or self.entry.cache_keep == 1.0:
            return ()
        cached = ((layer.index, (layer.attention.key, layer.attention.value)) for layer in geometry.layers)
        return tuple(Group(layer, CONDITION, roles_of(matrices)) for layer, matrices in cached)

    def measure(self, group: Group, geometry: LayerGeometry, weights: Weights) -> dict[str, list[float]]:
        """Return ln κ of the two matrices."""
        return {"log_condition": [log_condition(weights[f"{role}.weight"])[0] for role in group.roles]}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Factor k or v: first (r × D) gives the latents; second (C × r) rebuilds the heads, or W_o absorbs it."""
        rank, matrix, forms = ranks[group.name], geometry.matrices[group.roles[0]], self.forms(group, geometry, ranks)
        if not forms:
            return Solution(dict(weights), {}, {"dense": True})
        role = matrix.role
        first_rD, second_Cr, report = self._latent(matrix, weights[matrix.weight_key], rank, statistics)
        tensors = {f"{role}.first.weight": first_rD}
        if geometry.attention.writer.role in forms:
            tensors |= _absorbed_output(geometry.attention, weights, second_Cr)
            return Solution(tensors, forms, report | {"absorbed": True})
        tensors[f"{role}.second.weight"] = second_Cr
        tensors |= {name: weight for name, weight in weights.items() if name != matrix.weight_key}
        return Solution(tensors, forms, report)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map k or v to `latent`, and o to `absorbed` if W_o absorbs v's second factor. Dense roles are left out."""
        rank = ranks[group.name]
        if self._stays_dense(geometry, group.name, rank):
            return {}
        role = group.roles[0]
        if group.name == KEY:
            return {role: FormSpec(form="latent", rank=rank)}
        absorbs = _absorbs(geometry.attention, rank)
        latent = {role: FormSpec(form="latent", rank=rank, absorbed=absorbs)}
        return latent | ({geometry.attention.writer.role: FormSpec(form="absorbed", rank=rank)} if absorbs else {})

    def _latent(
        self, matrix: Matrix, weight_CD: Tensor, rank: int, statistics: Statistics
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return first (r, D), second (C, r) and figures for the report."""
        if self.entry.weighting == "loss":
            input_DD, pull_DD = statistics.mean(input_moment(matrix))[0], statistics.mean(pull((matrix,)))[0]
            order = directions([weight_CD], "loss", input_DD, pull_DD)
            first_rD, (second_Cr,) = factors(order, rank, [weight_CD])
            return first_rD, second_Cr, {"predicted": float(losses_by_rank(order, input_DD, pull_DD)[rank])}
        roots = input_roots(statistics.moments[input_moment(matrix)][0]) if self.entry.weighting == "input" else None
        first_rD, second_Cr, values = low_rank(weight_CD, rank, roots)
        report = {"error": dropped_share(values.square(), rank), "spectrum": spectrum(values.square())}
        return first_rD, second_Cr, report | ({"clipped": roots.clipped} if roots else {})

    def _stays_dense(self, geometry: LayerGeometry, name: str, rank: int) -> bool:
        """Return True at full rank and, under a budget of stored numbers, if the factors would save none."""
        full = rank >= self._full(geometry)
        return full or (not self.fixed_ranks and _factored(geometry, name, rank) >= _dense(geometry, name))

    def _full(self, geometry: LayerGeometry) -> int:
        """Return the smallest rank at which a group stays dense.

        With `cache_keep` this is C, because if D < C latents of D numbers are exact and smaller.
        """
        return _cached(geometry) if self.fixed_ranks else min(geometry.attention.key.shape)

    def _cost(self, geometry: LayerGeometry, name: str, rank: float) -> float:
        dense = _dense(geometry, name)
        if rank >= self._full(geometry):
            return dense
        factored = _factored(geometry, name, rank)
        return factored if self.fixed_ranks else min(factored, dense)


def _cache_ranks(
    variables: Sequence[RankVariable], targets: Mapping[Key, float], dense: Mapping[int, int], keep: float
) -> dict[Key, float]:
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


def _factored(geometry: LayerGeometry, name: str, rank: float) -> float:
    """Count the numbers stored by a group with latents."""
    block = geometry.attention
    D, C, HD = geometry.hidden, _cached(geometry), block.heads * geometry.hidden
    rebuilt = rank * (D + C) + sum(matrix.biases for matrix in _matrices(block, name))
    if name == KEY:
        return rebuilt
    rebuilt += HD * block.head_dim
    return rank * (D + HD) + block.writer.biases if _absorbs(block, rank) else rebuilt


def _dense(geometry: LayerGeometry, name: str) -> float:
    return geometry.numbers(roles_of(_matrices(geometry.attention, name)))


def _matrices(block: AttentionBlock, name: str) -> tuple[Matrix, ...]:
    """Return the matrices of a group. The output absorbs the second factor of the values if that is smaller."""
    return (block.key,) if name == KEY else block.value_output


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
