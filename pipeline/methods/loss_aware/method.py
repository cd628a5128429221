"""`method: loss_aware`: its claims. docs/methods.md#loss-aware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from manifests.methods import LossAware
from pipeline.families.blocks import roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group, Method
from pipeline.methods.loss_aware.attention import Values
from pipeline.methods.loss_aware.latents import latent_groups
from pipeline.methods.loss_aware.mlp import mlp_group
from pipeline.methods.loss_aware.query_key import QueryKey
from pipeline.methods.moments import input_moment, output_gradient, pair, pull


@dataclass(frozen=True)
class LossAwareMethod(Method[LossAware]):
    """`method: loss_aware` with the settings of its manifest entry."""

    name: ClassVar[str] = "loss_aware"

    def groups(self, layer: LayerGeometry) -> Iterator[Group[LossAware]]:
        """Claim groups `query_key` (q, k), `attention` (v, o), latent attention and the MLP.

        Raises ValueError for corrections of a layer whose router weighs the inputs of experts.
        """
        corrects = self.entry.correct == "output"
        if corrects and any(block.weighed for block in layer.mlps):
            raise ValueError(
                f"`correct: output` does not support layer {layer.index}, whose router weighs the inputs of "
                "experts; leave out correct"
            )
        for block in layer.attentions:
            pairs = (pair(block.input), pair(block.writer.reads)) if corrects else ()
            if self.entry.query_key:
                moments = input_moment(block.query), pull(block.query_key)
                yield QueryKey(self.entry, layer, "query_key", roles_of(block.query_key), moments, pairs[:1])
            if self.entry.attention:
                moments = input_moment(block.writer), output_gradient(block.writer)
                yield Values(self.entry, layer, "attention", roles_of(block.value_output), moments, pairs)
        if self.entry.attention:
            yield from latent_groups(self.entry, layer, output=True, corrects=corrects)
        for mlp in layer.mlps if self.entry.mlp else ():
            yield mlp_group(self.entry, layer, mlp, corrects)
