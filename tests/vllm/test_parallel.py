"""Sizes that devices divide, and this device's part of a stored tensor. `test_engines.py` runs two devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina import LaminaConfig
from lamina.engine_vllm.parallel import Cut, _fill, check_cut, unpacked_places
from lamina.engine_vllm.rounded import PARTS, Scheme
from manifests.records import Scheme as Stored
from pipeline.families.registry import checkpoint_config, standard_config
from pipeline.rounding.schemes import packed_tensors
from tests import factories


def config_of(family: str = "llama", forms: Any = ({}, {}), **sizes: Any) -> LaminaConfig:
    """Return the config of a checkpoint of two layers: four query heads, two of keys and values, 80 channels."""
    source = factories.make_config(family, num_hidden_layers=2, **sizes).to_dict()
    return LaminaConfig(**checkpoint_config(standard_config(source), forms, "float32"))


def pruned(width: int, block: str = "") -> dict[str, Any]:
    prefix = f"{block}." if block else ""
    return {prefix + role: {"form": "pruned", "rank": width} for role in ("gate", "up", "down")}


@pytest.mark.parametrize("parts", [1, 2])
def test_what_devices_divide(parts: int) -> None:
    """Ranks of factors need not be divided, because their sums are."""
    forms = ({"q": {"form": "low_rank", "rank": 7}, **pruned(34)}, {})
    check_cut(config_of(forms=forms), parts)
    check_cut(config_of("mixtral"), parts)


@pytest.mark.parametrize(
    ("config", "parts", "said"),
    [
        (config_of(), 4, "layer 0: 2 num_key_value_heads cannot be split over 4 devices; use another tensor_parallel"),
        (config_of(), 3, "layer 0: 4 num_attention_heads cannot be split over 3 devices"),
        (
            config_of(forms=({}, pruned(33))), 2,
            r"layer 1: 33 channels of the MLP cannot be split over 2 devices; compress with budget: \{multiple: 2\}",
        ),
        (
            config_of("mixtral", ({}, pruned(9, "experts.4"))), 2,
            "layer 1: 9 channels of experts.4 cannot be split over 2 devices",
        ),
        (config_of("deepseek_v3"), 1, "the attention of deepseek_v3 is transformers' own module"),
    ],
)  # fmt: skip
def test_what_devices_do_not_divide(config: LaminaConfig, parts: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_cut(config, parts)


def test_one_device_has_any_width() -> None:
    check_cut(config_of(forms=({}, pruned(33))), 1)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_put_together_are_the_whole(parts: int, dim: int) -> None:
    whole = torch.arange(6 * 12).view(6, 12)
    cut = [Cut(rank, parts).of(whole, dim) for rank in range(parts)]
    assert torch.equal(torch.cat(cut, dim), whole)
    assert len({part.shape for part in cut}) == 1


def test_a_tensor_of_another_shape_is_refused() -> None:
    parameter = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"a tensor of shape \(3, 2\), not \(2, 3\)"):
        _fill(parameter, torch.ones(3, 2))
    assert not parameter.any()
    _fill(parameter, torch.ones(2, 3))
    assert parameter.all()


def test_codes_of_a_linear_are_unpacked_once_all_are_there() -> None:
    """And then placed by the linear's own loader."""
    loaded: list[tuple[Any, torch.Tensor]] = []
    weight = SimpleNamespace(weight_loader=lambda *of: loaded.append(of))
    module: Any = SimpleNamespace(weight=weight)
    codes, scales = torch.tensor([[-2, 1, 0, 3]], dtype=torch.int8), torch.tensor([[0.5]])
    stored = packed_tensors("q", codes, scales, Stored(bits=4, group=None))
    places = unpacked_places(module, "q", Scheme(4, None))
    assert {*places} == {f"q.{part}" for part in PARTS}
    for name in reversed([*places]):
        assert not loaded
        places[name](stored[name])
    ((parameter, tensor),) = loaded
    assert parameter is weight
    assert tensor.tolist() == [[-1.0, 0.5, 0.0, 1.5]]
