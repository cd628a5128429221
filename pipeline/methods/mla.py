"""Latent attention of the DeepSeek type: keys and values from one latent, position in a few shared dimensions.

docs/methods.md#latent-attention.

Legend: D hidden, H query heads, G key/value heads, d head_dim, C = G·d, p rotated dimensions, r latents, R = r + p.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manifests.methods import MLA
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, roles_of
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.families.latent import LATENT_FORM, plain_pairs
from pipeline.kernels.latent import SplitKeys, distance_shares, fit_latents, head_rows, query_rows, split_keys
from pipeline.kernels.sensitivity import least_losses, output_directions
from pipeline.methods.base import MethodBase
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, to_columns

RANK, ROPE = "rank", "rope"  # kv_lora_rank, qk_rope_head_dim
CHOICES = 16  # of rotated dimensions that are compared, at most
SAMPLE_TOKENS, LEAST_SAMPLE = 8, 16_384  # of the sample, for each number of the hidden size, and in all


class _Problem(NamedTuple):
    """What both a curve and a solve of a layer need; moments are means per token, float64."""

    block: AttentionBlock
    query_QD: Tensor
    key_CD: Tensor
    value_CD: Tensor
    moment_DD: Tensor
    gradient_CC: Tensor
    metric_mm: Tensor
    sample_TD: Tensor
    frequencies_J: Tensor
    shares_GW: Tensor

    def split(self, shared: int) -> SplitKeys:
        """Return the keys with so many rotated dimensions."""
        return split_keys(
            self.key_CD, self.moment_DD, self.gradient_CC, self.frequencies_J, shared, self.shares_GW
        )

    def outputs(self, keys: SplitKeys) -> Tensor:
        """Return the map (2C, D) from the input to what latents have to give: keys without rotation, and values."""
        return torch.cat((keys.rest, self.value_CD))


@dataclass(frozen=True)
class MLAMethod(MethodBase[MLA]):
    """`method: mla` with the settings of its manifest entry."""

    name: ClassVar[str] = "mla"
    own_class: ClassVar[bool] = True

    @property
    def fixed_ranks(self) -> bool:
        """Return True: the share of the cache decides the size."""
        return True

    @property
    def uniform(self) -> bool:
        """Return True: the class has one size for all layers."""
        return True

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim a group `attention` (q, k, v) of every layer.

        Raises ValueError on a model that DeepSeek's class cannot say, and on sizes out of reach.
        """
        if geometry.latent_faults:
            raise ValueError(
                f"OUTPUT is of the DeepSeek type, which has no place for what this {geometry.model_type} model has: "
                f"{'; '.join(geometry.latent_faults)}; use lorc for its cache"
            )
        self._choices(geometry.layers[0])
        return tuple(self._group(layer) for layer in geometry.layers)

    def _group(self, layer: LayerGeometry) -> Group:
        block = layer.attention
        moments = (
            input_moment(block.key),
            *(Moment(f"{matrix.role}.out", kind="gradient") for matrix in (block.key, block.value)),
            _sample(layer),
        )
        return Group(layer.index, block.name, roles_of(block.readers), moments)

    def _cached(self, layer: LayerGeometry) -> int:
        """Return R, the numbers that a token caches; at most as many latents as the hidden state has numbers."""
        return int(self.entry.cache_keep * layer.cache_numbers + 1e-9)

    def _choices(self, layer: LayerGeometry) -> list[tuple[int, int]]:
        """Return (r, p) of every choice. Raises ValueError if there is none."""
        cached, head_dim = self._cached(layer), layer.attention.head_dim
        most = min(2 * plain_pairs(layer.frequencies), cached - 1)
        if self.entry.rope is not None:
            if not 2 <= self.entry.rope <= most:
                raise ValueError(
                    f"rope: {self.entry.rope}, allowed is 2 to {most // 2 * 2}: heads of {head_dim} dimensions, whose "
                    f"first {2 * plain_pairs(layer.frequencies)} turn by powers of one angle, and {cached} numbers"
                )
            shared = [self.entry.rope]
        else:
            step = 2 * max(1, head_dim // 2 // CHOICES)
            shared = [*range(step, most + 1, step)]
        if not shared:
            raise ValueError(
                f"cache_keep: {self.entry.cache_keep:g} of {layer.cache_numbers} cached numbers leaves {cached}, too "
                "few for a latent beside rotated dimensions; keep more"
            )
        return [(min(cached - rope, layer.hidden, 2 * layer.attention.key.outputs), rope) for rope in shared]

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return the rank of the latent; the rotated dimensions have the rest of the cache."""
        most = max(rank for rank, _ in self._choices(geometry))
        return (RankVariable(group.layer, group.name, RANK, most, 1, lambda rank: _numbers(geometry, rank, self._cached(geometry) - rank)),)

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return the numbers that a token caches in all layers."""
        return sum(self._cached(layer) for layer in geometry.layers)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the smallest latents: which are chosen follows from the curves."""
        least = {layer.index: min(rank for rank, _ in self._choices(layer)) for layer in geometry.layers}
        return {variable.key: least[variable.layer] for variable in self.rank_variables(geometry)}

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored with the smallest latents."""
        return min(_numbers(geometry, *sizes) for sizes in self._choices(geometry))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss of every choice of rotated dimensions; all cache the same."""
        problem, points = _problem(geometry, weights, statistics), []
        for rank, rope in self._choices(geometry):
            keys = problem.split(rope)
            outputs_mD = problem.outputs(keys)
            lost = least_losses(problem.metric_mm, outputs_mD @ problem.moment_DD @ outputs_mD.T)
            loss = keys.loss + float(lost[rank])
            points.append(Point({RANK: rank, ROPE: rope}, _numbers(geometry, rank, rope), loss, rank + rope))
        return to_columns(points)

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Return the query with its rows for shared keys, the latents with these, their norm, and what decodes them."""
        problem, rank, rope = _problem(geometry, weights, statistics), ranks[RANK], ranks[ROPE]
        keys = problem.split(rope)
        outputs_mD = problem.outputs(keys)
        order = output_directions(outputs_mD, problem.moment_DD, problem.metric_mm)
        cut = 0.5 * float(order.values[rank:].clamp_min(0.0).sum())
        latents = fit_latents(
            problem.sample_TD, problem.moment_DD, outputs_mD, problem.metric_mm, order.encode[:rank] @ outputs_mD
        )
        block = problem.block
        name = block.name
        tensors = {
            block.query.weight_key: query_rows(problem.query_QD, keys.read, (1 + rope / block.head_dim) ** 0.5),
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
            "error": float(2.0 * latents.loss / max(1e-300, float(_felt(outputs_mD, problem)))),
        }
        return Solution({key: tensor.contiguous() for key, tensor in tensors.items()}, self.forms(group, geometry, ranks), report)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map q, k and v to latent attention of these sizes."""
        return {role: FormSpec(form=LATENT_FORM, rank=ranks[RANK], rope=ranks[ROPE], group=group.name) for role in group.roles}


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


def _felt(outputs_mD: Tensor, problem: _Problem) -> Tensor:
    """Return E[yᵀ G y] of the outputs y."""
    return ((outputs_mD @ problem.moment_DD @ outputs_mD.T) * problem.metric_mm).sum()
