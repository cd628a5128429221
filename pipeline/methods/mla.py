"""Latent attention of the DeepSeek type: one latent for keys and values, with position in a few shared dimensions.

docs/methods.md#mla.

Legend: D hidden, H query heads, G key/value heads, d head_dim, C = G·d, p rotated dimensions, r latents, R = r + p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manifests.methods import MLA
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.latent import LATENT_FORM, plain_pairs
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.fitted_turns import FIT_STEPS, fit_turns
from pipeline.kernels.latent import SplitKeys, distance_shares, fit_latents, head_rows, query_rows, split_keys, turns
from pipeline.kernels.sensitivity import least_losses, output_directions
from pipeline.methods.base import MethodBase
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

RANK, ROPE = "rank", "rope"  # kv_lora_rank, qk_rope_head_dim
DENSITY = "density"  # rotated frequencies for each of the source's; a point without it has density 1
_ROUNDING = 1e-9  # of a share of the cache
DENSITIES = {1: 16, 2: 8, 3: 8, 4: 8, 6: 8, 8: 8}  # density -> the most numbers of rotated dimensions compared
SAMPLE_TOKENS, LEAST_SAMPLE = 8, 16_384  # tokens of the sample per hidden dimension, and in all at least


class _Problem(NamedTuple):
    """The inputs of a layer's curve and solve; moments are means per token, float64.

    Attributes:
        query, key, value: (Q, D), (C, D) and (C, D).
        moment: (D, D), of the input. `gradient`: (C, C), at the keys. `metric`: (2C, 2C), at keys and values.
        sample: (T, D), inputs. `frequencies`: (J,). `shares`: (G, W), attention by distance.
    """

    block: AttentionBlock
    query: Tensor
    key: Tensor
    value: Tensor
    moment: Tensor
    gradient: Tensor
    metric: Tensor
    sample: Tensor
    frequencies: Tensor
    shares: Tensor

    def split(self, shared: int, density: int, steps: int | None = 0) -> SplitKeys:
        """Split keys into `shared` rotated dimensions, fitted in so many steps, and parts without rotation.

        None: not fitted at all.
        """
        turns_I = turns(self.frequencies, shared, density)
        given = self.key, self.moment, self.gradient, self.frequencies, turns_I, self.shares
        return split_keys(*given) if steps is None else fit_turns(split_keys(*given), *given, steps)

    def outputs(self, keys: SplitKeys) -> Tensor:
        """Return the map (2C, D) from the input to the targets of the latents: keys without rotation, and values."""
        return torch.cat((keys.rest, self.value))


@dataclass(frozen=True)
class MLAMethod(MethodBase[MLA]):
    """`method: mla` with the settings of its manifest entry."""

    name: ClassVar[str] = "mla"
    own_class: ClassVar[bool] = True

    @property
    def fixed_ranks(self) -> bool:
        """Return True: the share of the cache determines the size."""
        return True

    @property
    def uniform(self) -> bool:
        """Return True: DeepSeek's class has one size for all layers."""
        return True

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim a group `attention` (q, k, v) of every layer.

        Raises ValueError on a model that DeepSeek's class cannot express, and on sizes out of reach.
        """
        if geometry.latent_faults:
            raise ValueError(
                f"OUTPUT is of the DeepSeek type, which cannot express this {geometry.model_type} model: "
                f"{'; '.join(geometry.latent_faults)}; use lorc for its cache"
            )
        if geometry.outer_bytes or any(layer.own_bytes for layer in geometry.layers):
            raise ValueError("OUTPUT would mix weights in the source's storage format with decoded ones")
        self._check(geometry.layers[0])
        return tuple(self._group(layer) for layer in geometry.layers)

    def _group(self, layer: LayerGeometry) -> Group:
        block = layer.attention
        moments = (
            input_moment(block.key),
            *(Moment(f"{matrix.role}.out", kind="gradient") for matrix in (block.key, block.value)),
            _sample(layer),
        )
        return Group(layer.index, block.name, roles_of(block.readers), moments)

    def _check(self, layer: LayerGeometry) -> None:
        """Raise ValueError if no size fits the entry."""
        cached, turned = self._cached(layer), max(_most_shared(layer, density) for density in _densities(layer))
        if self.entry.rope is not None and self.entry.rope > turned:
            raise ValueError(
                f"rope: {self.entry.rope} is more than {turned}, the rotated dimensions of {layer.attention.kv_heads} "
                f"key heads of {layer.attention.head_dim} whose angles are powers of one base"
            )
        least = min(shared for shared, _ in self._choices(layer)) + self._ranks(layer)[0]
        if cached < least:
            raise ValueError(
                f"cache_keep: {self.entry.cache_keep:g} of {layer.cache_numbers} cached numbers leaves {cached}, and "
                f"the smallest latent with its rotated dimensions takes {least}; keep more"
            )

    def _cached(self, layer: LayerGeometry) -> int:
        """Return R, the numbers that a token may cache."""
        return int(self.entry.cache_keep * layer.cache_numbers + _ROUNDING)

    def _choices(self, layer: LayerGeometry) -> list[tuple[int, int]]:
        """Return the numbers of rotated dimensions to compare, each with a density."""
        densities = _densities(layer)
        if (rope := self.entry.rope) is not None:
            return [(rope, density) for density in densities if rope <= _most_shared(layer, density)]
        return [(shared, density) for density in densities for shared in _spread(layer, density)]

    def _ranks(self, layer: LayerGeometry) -> list[int]:
        """Return the ranks of the latent to compare, ascending. The last one is exact."""
        return steps(min(layer.hidden, layer.cache_numbers), self.entry.multiple(layer.hidden))

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return the rank of the latent; its cost bounds that of every choice of rotated dimensions beside it."""
        cap = max(1, min(self._ranks(geometry)[-1], self._cached(geometry)))
        widest = max(shared for shared, _ in self._choices(geometry))
        cost = partial(_bounded_numbers, geometry, rope=widest, most=self._most_numbers(geometry))
        return (RankVariable(group.layer, group.name, RANK, cap, 1, cost),)

    def _most_numbers(self, layer: LayerGeometry) -> float:
        """Return the most numbers stored by any latent whose rotated dimensions fit into the cache beside it."""
        last, cached = self._ranks(layer)[-1], self._cached(layer)
        shared = [shared for shared, _ in self._choices(layer) if shared < cached]
        return max((_numbers(layer, min(last, cached - each), each) for each in shared), default=math.inf)

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return the numbers that a token may cache in all layers."""
        return sum(self._cached(layer) for layer in geometry.layers)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the largest latent that fits into the cache; curves choose among smaller ones."""
        return {variable.key: variable.cap for variable in self.rank_variables(geometry)}

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored with the smallest latent."""
        return round(_numbers(geometry, self._ranks(geometry)[0], min(self._choices(geometry))[0]))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss of every rank with every number of rotated dimensions and density, for any `cache_keep`."""
        problem, points = _problem(geometry, weights, statistics), []
        for rope, density in self._choices(geometry):
            keys = problem.split(rope, density)
            outputs_mD = problem.outputs(keys)
            losses = least_losses(problem.metric, outputs_mD @ problem.moment @ outputs_mD.T).tolist()
            points += [
                Point(
                    {RANK: rank, ROPE: rope, DENSITY: density},
                    round(_numbers(geometry, rank, rope)),
                    keys.loss + losses[rank],
                    rank + rope,
                )
                for rank in self._ranks(geometry)
            ]
        return to_columns(points)

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Return the query with rows for the shared keys, the encoder of latents and shared keys, the latents' norm,
        and their decoder."""
        problem, rank, rope = _problem(geometry, weights, statistics), ranks[RANK], ranks[ROPE]
        keys = problem.split(rope, ranks.get(DENSITY, 1), FIT_STEPS if DENSITY in ranks else None)
        outputs_mD = problem.outputs(keys)
        order = output_directions(outputs_mD, problem.moment, problem.metric)
        cut = 0.5 * float(order.values[rank:].clamp_min(0.0).sum())
        latents = fit_latents(
            problem.sample, problem.moment, outputs_mD, problem.metric, order.encode[:rank] @ outputs_mD
        )
        block = problem.block
        name = block.name
        tensors = {
            block.query.weight_key: query_rows(problem.query, keys.read, (1 + rope / block.head_dim) ** 0.5),
            f"{name}.kv_a_proj_with_mqa.weight": torch.cat((latents.encode, keys.shared)),
            f"{name}.kv_a_layernorm.weight": latents.encode.new_ones(rank),
            f"{name}.kv_b_proj.weight": head_rows(latents.decode, block.heads, block.kv_heads),
        }
        report = {
            "predicted": keys.loss + latents.loss,
            "unrotated": keys.loss,
            "cut": cut,
            "normed": latents.loss,
            "normed_before": latents.before,
            "error": float(2.0 * latents.loss / max(1e-300, float(_weighted_energy(outputs_mD, problem)))),
        }
        return Solution(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, self.forms(group, geometry, ranks), report
        )

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map q, k and v to latent attention of these sizes."""
        density = ranks.get(DENSITY, 1)
        form = FormSpec(
            form=LATENT_FORM,
            rank=ranks[RANK],
            rope=ranks[ROPE],
            group=group.name,
            density=None if density == 1 else density,
        )
        return dict.fromkeys(group.roles, form)


def _densities(layer: LayerGeometry) -> list[int]:
    """Return the densities to compare: a frequency has a complex number for each key head, and rotates no more."""
    pairs = plain_pairs(layer.frequencies)
    return [density for density in DENSITIES if density == 1 or (pairs > 1 and density <= layer.attention.kv_heads)]


def _most_shared(layer: LayerGeometry, density: int) -> int:
    """Return the most rotated dimensions of a density; above one, those of half of the dense cache."""
    most = 2 * density * plain_pairs(layer.frequencies)
    return most if density == 1 else min(most, layer.cache_numbers // 2)


def _spread(layer: LayerGeometry, density: int) -> range:
    """Return the numbers of rotated dimensions to compare at a density."""
    most = layer.attention.head_dim if density == 1 else _most_shared(layer, density)
    step = 2 * max(1, most // 2 // DENSITIES[density])
    return range(step, _most_shared(layer, density) + 1, step)


def _sample(layer: LayerGeometry) -> Moment:
    tokens = max(LEAST_SAMPLE, SAMPLE_TOKENS * layer.hidden)
    return Moment(layer.attention.input, kind="sample", tokens=tokens)


def _numbers(layer: LayerGeometry, rank: float, rope: float) -> float:
    """Count the numbers that q, k and v store as latent attention, the norm's included."""
    block = layer.attention
    return (
        block.heads * (block.head_dim + rope) * layer.hidden
        + (rank + rope) * layer.hidden
        + rank
        + 2 * block.heads * block.head_dim * rank
    )


def _bounded_numbers(layer: LayerGeometry, rank: float, rope: float, most: float) -> float:
    return min(most, _numbers(layer, rank, rope))


def _problem(geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> _Problem:
    block = geometry.attention
    query_QD, key_CD, value_CD = (weights[matrix.weight_key].double() for matrix in block.readers)
    gradients = [statistics.mean(Moment(f"{m.role}.out", kind="gradient"))[0] for m in (block.key, block.value)]
    sample_TD = statistics.moments[_sample(geometry)][0].double()
    frequencies_J = torch.tensor(geometry.frequencies, dtype=torch.float64, device=key_CD.device)
    shares_GW = distance_shares(sample_TD, query_QD, key_CD, block.kv_heads, frequencies_J, block.head_dim**-0.5)
    return _Problem(
        block,
        query_QD,
        key_CD,
        value_CD,
        statistics.mean(input_moment(block.key))[0],
        gradients[0],
        torch.block_diag(*gradients),
        sample_TD,
        frequencies_J,
        shares_GW,
    )


def _weighted_energy(outputs_mD: Tensor, problem: _Problem) -> Tensor:
    """Return E[yᵀ G y] for the outputs y."""
    return ((outputs_mD @ problem.moment @ outputs_mD.T) * problem.metric).sum()
