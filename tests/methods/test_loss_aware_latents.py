"""Latent attention under loss_aware: sizes are what is stored, and a solution computes what its ranks say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import LayersConfig
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.factored_lamina import stored_state
from manifests.methods import LossAware
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.base import Group
from pipeline.methods.loss_aware import latents
from pipeline.methods.method import Solution, Statistics
from pipeline.ranks.curves import from_columns
from tests import factories

TOKENS = 400


class Problem:
    """The latent attention of a layer with random weights, and statistics of random values."""

    def __init__(self, family: str, factors: str) -> None:
        fields = factories.make_config(family).to_dict()
        self.config = standard_config(fields)
        self.layer: LayerGeometry = geometry_of(self.config).layers[0]
        self.entry = LossAware.model_validate({"method": "loss_aware", "factors": factors})
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        groups = [*latents.latent_groups(self.entry, self.layer, output=True)]
        self.weights = {
            key: 0.5 + draw(*shape).abs() if "norm" in key else draw(*shape)
            for group in groups
            for key, (_, shape) in self.layer.tensors(group.roles).items()
        }
        self.moments = {}
        for moment in dict.fromkeys(moment for group in groups for moment in group.moments):
            values = draw(TOKENS, self.layer.features(moment.point))
            total = values.T @ values / (TOKENS if moment.kind == "gradient" else 1)
            self.moments[moment] = total[None]
        self.groups = {group.name: group for group in groups}

    def statistics(self) -> Statistics:
        return Statistics(self.moments, TOKENS)

    def of(self, group: Group[Any]) -> dict[str, Tensor]:
        return {key: self.weights[key] for key in self.layer.tensors(group.roles)}

    def curve(self, group: Group[Any]) -> Any:
        return group.with_data(self.of(group), self.statistics()).curve()

    def solve(self, group: Group[Any], ranks: dict[str, int]) -> Solution:
        return group.with_data(self.of(group), self.statistics()).solve(ranks)

    def stored(self, solution: Solution) -> dict[str, tuple[int, ...]]:
        """Names inside of the layer and shapes of the tensors that the served layer has for these forms."""
        forms = {role: form.as_json() for role, form in solution.forms.items()}
        config = LayersConfig(**{**self.config, "forms": [forms] + [{}] * (self.config["num_hidden_layers"] - 1)})
        with torch.device("meta"):
            state = stored_state(DecoderLayer(config, 0))
        return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("factors", ["pivoted", "plain"])
@pytest.mark.parametrize("family", factories.FOREIGN)
def test_a_point_s_numbers_are_what_is_stored(family: str, factors: str) -> None:
    """And the served layer has a place of its shape for each tensor."""
    problem = Problem(family, factors)
    for group in problem.groups.values():
        points = from_columns(problem.curve(group))
        assert points[0].numbers == group.least_numbers()
        assert (points[-1].loss, points[-1].numbers) == (0.0, problem.layer.numbers(group.roles))
        for point in points[:: max(1, len(points) // 8)]:
            solution = problem.solve(group, dict(point.ranks))
            stored = problem.stored(solution)
            for key, tensor in solution.tensors.items():
                name = problem.layer.tensor_name(key, group.roles).removeprefix(problem.layer.prefix)
                assert stored[name] == tuple(tensor.shape)
            integers = {key for key, tensor in solution.tensors.items() if not tensor.is_floating_point()}
            numbers = sum(
                tensor.numel() * (2 if key in integers else 1) for key, tensor in solution.tensors.items()
            )  # an index of 32 bits counts as two numbers of 16
            assert numbers == point.numbers


@pytest.mark.parametrize("values", [5, 14])
@pytest.mark.parametrize("latent", [6, 12])
def test_values_of_a_basis_are_read_by_the_output_projection(latent: int, values: int) -> None:
    """At the full width of the latent and the full rank of o: o' (E V) n is o V n, but for what the basis drops."""
    problem = Problem("deepseek_v3", "pivoted")
    group, block = problem.groups[latents.VALUES], problem.layer.latent_attention
    assert block is not None
    solution = problem.solve(group, {"latent": latent, "value": values, "o_proj": 48})
    assert ("o_proj" in solution.forms) == (values < 14)
    assert ("kv_b_proj" in solution.forms) == (latent < 12 or values < 14)
    if latent < 12:
        return
    if values == 14:
        assert solution.report == {"dense": True}
        assert all(torch.equal(tensor, problem.weights[key]) for key, tensor in solution.tensors.items())
    product = product_of(block, solution.tensors)
    error = (product - product_of(block, problem.weights)).norm() / product.norm()
    assert error < 1e-9 if values == 14 else 0.05 < error < 1.0


def product_of(block: Any, tensors: dict[str, Tensor]) -> Tensor:
    """(D, L): the sum over heads of the output projection times the reader's rows of values."""
    reader_HXL = tensors["kv_b_proj.weight"].double().unflatten(0, (block.heads, -1))[:, block.key_width :]
    writer_DHw = tensors["o_proj.weight"].double().unflatten(1, (block.heads, -1))
    return torch.einsum("dhw,hwl->dl", writer_DHw, reader_HXL)
