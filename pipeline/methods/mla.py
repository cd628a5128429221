"""Latent attention of the DeepSeek type: one latent for keys and values, with position in a few shared dimensions.

docs/methods.md#mla.

Legend: D hidden, H query heads, G key/value heads, d head_dim, C = G·d, p rotated dimensions, r latents, R = r + p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import MLA
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.latent import LATENT_FORM, plain_pairs
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.fitted_turns import FIT_STEPS, fit_turns
from pipeline.kernels.latent import SplitKeys, distance_shares, fit_latents, head_rows, query_rows, split_keys, turns
from pipeline.kernels.sensitivity import least_losses, output_directions
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Moment, Ranks, Scores, Solution
from pipeline.methods.moments import input_moment
from pipeline.methods.work import CUT_SHARE, Work
from pipeline.ranks.budget import RankKey, RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

RANK, ROPE = "rank", "rope"  # kv_lora_rank, qk_rope_head_dim
DENSITY = "density"  # rotated frequencies for each of the source's; a point without it has density 1
_ROUNDING = 1e-9  # of a share of the cache
DENSITIES = {1: 16, 2: 8, 3: 8, 4: 8, 6: 8, 8: 8}  # density -> the most numbers of rotated dimensions compared
MOST_CHOICES, FIT_CALLS = 56, 40  # of rotated dimensions; evaluations of the loss of a normed latent
SAMPLE_TOKENS, LEAST_SAMPLE = 8, 16_384  # tokens of the sample per hidden dimension, and in all at least


class LatentAttention(Group[MLA]):
    """q, k and v of a layer as latent attention. Moments are means per token, float64."""

    @property
    def cached(self) -> int:
        """Return R, the numbers that a token may cache."""
        return int(self.entry.cache_keep * self.geometry.cache_numbers + _ROUNDING)

    @property
    def choices(self) -> list[tuple[int, int]]:
        """Return the numbers of rotated dimensions to compare, each with a density."""
        densities = _densities(self.geometry)
        if (rope := self.entry.rope) is not None:
            return [(rope, density) for density in densities if rope <= _most_shared(self.geometry, density)]
        return [(shared, density) for density in densities for shared in _spread(self.geometry, density)]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the latent to compare, ascending. The last one is exact."""
        return steps(min(self.geometry.hidden, self.geometry.cache_numbers), self.multiple)

    def check(self) -> None:
        """Raise ValueError if no size fits the entry."""
        layer, cached = self.geometry, self.cached
        turned = max(_most_shared(layer, density) for density in _densities(layer))
        if self.entry.rope is not None and self.entry.rope > turned:
            raise ValueError(
                f"rope: {self.entry.rope} is more than {turned}, the rotated dimensions of {layer.attention.kv_heads} "
                f"key heads of {layer.attention.head_dim} whose angles are powers of one base"
            )
        least = min(shared for shared, _ in self.choices) + self.ranks[0]
        if cached < least:
            raise ValueError(
                f"cache_keep: {self.entry.cache_keep:g} of {layer.cache_numbers} cached numbers leaves {cached}, and "
                f"the smallest latent with its rotated dimensions takes {least}; keep more"
            )

    def variables(self) -> tuple[RankVariable, ...]:
        """Return the rank of the latent; its cost bounds that of every choice of rotated dimensions beside it."""
        widest, last, cached = max(shared for shared, _ in self.choices), self.ranks[-1], self.cached
        beside = [shared for shared, _ in self.choices if shared < cached]
        most = max((_numbers(self.geometry, min(last, cached - each), each) for each in beside), default=math.inf)
        cap = max(1, min(last, cached))
        return (self.variable(RANK, cap, lambda rank: min(most, _numbers(self.geometry, rank, widest)), multiple=1),)

    def least_numbers(self) -> int:
        """Count the numbers stored with the smallest latent."""
        return round(_numbers(self.geometry, self.ranks[0], min(self.choices)[0]))

    def curve(self) -> Curve:
        """Predict the loss of every rank with every number of rotated dimensions and density, for any `cache_keep`."""
        points = []
        for rope, density in self.choices:
            keys = self._split(rope, density)
            outputs_mD = self._outputs(keys)
            losses = least_losses(self._metric, outputs_mD @ self._moment @ outputs_mD.T).tolist()
            points += [
                Point(
                    {RANK: rank, ROPE: rope, DENSITY: density},
                    round(_numbers(self.geometry, rank, rope)),
                    keys.loss + losses[rank],
                    rank + rope,
                )
                for rank in self.ranks
            ]
        return to_columns(points)

    def solve(self, ranks: Ranks) -> Solution:
        """Return the query with rows for the shared keys, the encoder of latents and shared keys, the latents' norm,
        and their decoder."""
        block, rank, rope = self.geometry.attention, ranks[RANK], ranks[ROPE]
        keys = self._split(rope, ranks.get(DENSITY, 1), FIT_STEPS if DENSITY in ranks else None)
        outputs_mD, name = self._outputs(keys), block.name
        order = output_directions(outputs_mD, self._moment, self._metric)
        cut = 0.5 * float(order.values[rank:].clamp_min(0.0).sum())
        encode_rD = order.encode[:rank] @ outputs_mD
        latents = fit_latents(self._sample, self._moment, outputs_mD, self._metric, encode_rD)
        tensors = {
            block.query.weight_key: query_rows(self._query, keys.read, (1 + rope / block.head_dim) ** 0.5),
            f"{name}.kv_a_proj_with_mqa.weight": torch.cat((latents.encode, keys.shared)),
            f"{name}.kv_a_layernorm.weight": latents.encode.new_ones(rank),
            f"{name}.kv_b_proj.weight": head_rows(latents.decode, block.heads, block.kv_heads),
        }
        energy = ((outputs_mD @ self._moment @ outputs_mD.T) * self._metric).sum()  # E[yᵀ G y] for the outputs y
        report = {
            "predicted": keys.loss + latents.loss,
            "unrotated": keys.loss,
            "cut": cut,
            "normed": latents.loss,
            "normed_before": latents.before,
            "error": float(2.0 * latents.loss / max(1e-300, float(energy))),
        }
        return Solution({key: tensor.contiguous() for key, tensor in tensors.items()}, self.forms(ranks), report)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map q, k and v to latent attention of these sizes."""
        density = ranks.get(DENSITY, 1)
        form = FormSpec(
            form=LATENT_FORM,
            rank=ranks[RANK],
            rope=ranks[ROPE],
            group=self.name,
            density=None if density == 1 else density,
        )
        return dict.fromkeys(self.roles, form)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count one choice of rotated dimensions, and a fit on the sample."""
        return self._work(1, min(_sample(self.geometry).tokens, tokens))

    def curve_work(self, tokens: int) -> Work:
        """Count the directions of keys and values for each choice of rotated dimensions."""
        return self._work(MOST_CHOICES, 0)

    def _work(self, choices: int, sampled: int) -> Work:
        hidden, outputs = self.geometry.hidden, self.geometry.attention.cache_numbers
        rank = CUT_SHARE * min(outputs, hidden)
        products = choices * 2.0 * outputs * hidden * (hidden + outputs)
        step = sampled * (4.0 * hidden * rank + 6.0 * rank * outputs + 2.0 * rank**2)
        return Work(products + FIT_CALLS * step, vectors=choices * float(outputs) ** 3)

    @cached_property
    def _query(self) -> Tensor:
        return self.weight(self.geometry.attention.query).double()

    @cached_property
    def _key(self) -> Tensor:
        return self.weight(self.geometry.attention.key).double()

    @cached_property
    def _moment(self) -> Tensor:
        """Return the moment of the input (D, D)."""
        return self.mean(self.moments[0])

    @cached_property
    def _metric(self) -> Tensor:
        """Return the moment of the gradient at keys and values (2C, 2C)."""
        metric: Tensor = torch.block_diag(*map(self.mean, self.moments[1:3]))
        return metric

    @cached_property
    def _sample(self) -> Tensor:
        """Return inputs (T, D)."""
        return self.statistics.moments[_sample(self.geometry)][0].double()

    @cached_property
    def _rotation(self) -> tuple[Tensor, Tensor]:
        """Return the frequencies (J,), and the attention by distance (G, W)."""
        block = self.geometry.attention
        frequencies_J = torch.tensor(self.geometry.frequencies, dtype=torch.float64, device=self._key.device)
        scale = block.head_dim**-0.5
        return frequencies_J, distance_shares(
            self._sample, self._query, self._key, block.kv_heads, frequencies_J, scale
        )

    def _split(self, shared: int, density: int, steps: int | None = 0) -> SplitKeys:
        """Split keys into `shared` rotated dimensions, fitted in so many steps, and parts without rotation.

        None: not fitted at all.
        """
        frequencies_J, shares_GW = self._rotation
        turns_I, gradient_CC = turns(frequencies_J, shared, density), self.mean(self.moments[1])
        problem = self._key, self._moment, gradient_CC, frequencies_J, turns_I, shares_GW
        return split_keys(*problem) if steps is None else fit_turns(split_keys(*problem), *problem, steps)

    def _outputs(self, keys: SplitKeys) -> Tensor:
        """Return the map (2C, D) from the input to the targets of the latents: keys without rotation, and values."""
        return torch.cat((keys.rest, self.weight(self.geometry.attention.value).double()))


@dataclass(frozen=True)
class MLAMethod(Method[MLA]):
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

    def claims(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Claim the groups of every layer.

        Raises ValueError on a model that DeepSeek's class cannot express, and on sizes out of reach.
        """
        if geometry.latent_faults:
            raise ValueError(
                f"OUTPUT is of the DeepSeek type, which cannot express this {geometry.model_type} model: "
                f"{'; '.join(geometry.latent_faults)}; use lorc for its cache"
            )
        if geometry.outer_bytes or any(layer.own_bytes for layer in geometry.layers):
            raise ValueError("OUTPUT would mix weights in the source's storage format with decoded ones")
        self._group(geometry.layers[0]).check()
        return super().claims(geometry)

    def groups(self, layer: LayerGeometry) -> Iterator[LatentAttention]:
        """Claim a group `attention` (q, k, v)."""
        yield self._group(layer)

    def _group(self, layer: LayerGeometry) -> LatentAttention:
        block = layer.attention
        gradients = (Moment(f"{matrix.role}.out", kind="gradient") for matrix in (block.key, block.value))
        moments = (input_moment(block.key), *gradients, _sample(layer))
        return LatentAttention(self.entry, layer, block.name, roles_of(block.readers), moments)

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return the numbers that a token may cache in all layers."""
        return sum(self._group(layer).cached for layer in geometry.layers)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return the largest latent that fits into the cache; curves choose among smaller ones."""
        return {variable.key: variable.cap for variable in self.rank_variables(geometry)}


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
