"""Creates source models of all families, and loads compressed checkpoints into the source's own class.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, r and k ranks, n heads of a projection.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests import factories
from tests.end_to_end.jobs import read_tensors

FAMILIES = tuple(factories.FAMILIES)


def make_source(directory: Path, family: str, layers: int = 2, **overrides: Any) -> Path:
    """Call `factories.make_model` for a number of layers."""
    return factories.make_model(directory, family, num_hidden_layers=layers, **overrides)


def densified(source: Path, output: Path, layers: int | None = None) -> Any:
    """Return the source's class with a compressed checkpoint's weights: zeros for pruned rows, products for factors.

    `layers`: the number of first layers to take from `output`. float32, ready to run.
    """
    config = AutoConfig.from_pretrained(source)
    written = json.loads((output / "config.json").read_text())
    block, tensors = written["block"], read_tensors(output)
    state = read_tensors(source)
    for layer in range(written["num_hidden_layers"] if layers is None else layers):
        prefix = f"{block['layers']}.{layer}."
        state = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        state |= {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for role, form in written["forms"][layer].items():
            path = prefix + block["modules"][role]
            factors = {name: state.pop(name).float() for name in list(state) if name.startswith(path + ".")}
            state |= {f"{path}.{part}": tensor for part, tensor in _dense(role, form, path, factors, written).items()}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in state.items()}, strict=False)
    assert not unexpected
    assert not set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.eval()


def _dense(
    role: str, form: dict[str, Any], path: str, factors: dict[str, Tensor], config: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the weight, and the bias if there is one, that compute the same as the factors."""
    d, rank, kind = config["head_dim"], form["rank"], form["form"]
    found: dict[str, Tensor] = {}
    if f"{path}.bias" in factors:
        found["bias"] = factors[f"{path}.bias"]
    if kind == "head_low_rank":
        second_ndr = factors[f"{path}.second"]
        first_nrD = factors[f"{path}.first.weight"].unflatten(0, (second_ndr.shape[0], rank))
        assert set(factors) <= {f"{path}.second", f"{path}.first.weight", f"{path}.bias"}
        return {**found, "weight": torch.bmm(second_ndr, first_nrD).flatten(0, 1)}
    weight = factors[f"{path}.weight"]
    if kind == "head_pca" and role == "o":
        return {**found, "weight": _padded(weight.unflatten(1, (-1, rank)), 2, d).flatten(1)}
    if kind == "head_pca":
        found = {name: _padded(bias.unflatten(0, (-1, rank)), 1, d).flatten() for name, bias in found.items()}
        return {**found, "weight": _padded(weight.unflatten(0, (-1, rank)), 1, d).flatten(0, 1)}
    assert kind == "pruned"
    if role == "down":
        return {**found, "weight": _padded(weight, 1, config["intermediate_size"])}
    found = {name: _padded(bias, 0, config["intermediate_size"]) for name, bias in found.items()}
    return {**found, "weight": _padded(weight, 0, config["intermediate_size"])}


def _padded(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Append zeros along one axis, up to `size`."""
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)
