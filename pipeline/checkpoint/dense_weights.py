"""The dense weights that a compressed layer stands for, whatever its forms.

Legend: D hidden, H query heads, G key/value heads, d head_dim, w width of a value head, N MLP width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lamina.decoder_layer_lamina import DecoderLayer, SelfAttention
from manifests.errors import InputError
from pipeline.families.family import LayerGeometry

ROUNDINGS = 64  # of the stored numbers: what is exact but for them


@torch.inference_mode()
def dense_weights(layer: DecoderLayer, geometry: LayerGeometry, stored: torch.dtype) -> dict[str, Tensor]:
    """`role.weight` and `role.bias` in float64, as a dense layer of the family has them; MLPs at their own width.

    Every projection is linear whatever it is made of, so its matrix is what it does to the unit vectors. Value heads of
    another width than d are brought to d: narrower ones with zeros, wider ones (absorbed latents) through the d
    directions of which they are made. `stored`: the coarsest dtype that the factors of v and o were rounded to.

    Raises InputError when value heads are of a rank that d numbers do not hold.
    """
    layer = layer.to(torch.float64)
    block = geometry.attention
    G, d = block.kv_heads, block.head_dim
    value, output = block.value_output
    tensors: dict[str, Tensor] = {}
    for role in (norm.role for norm in geometry.norms):
        tensors |= {f"{role}.{name}": tensor for name, tensor in layer.role(role).state_dict().items()}
    matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for role in (*block.roles[:-1], *(role for mlp in geometry.mlps for role in mlp.roles)):
        fed = next((other for other in matrices if geometry.matrices[other].feeds == geometry.matrices[role].reads), "")
        width = matrices[fed].shape[0] if fed else geometry.hidden
        matrices[role], biases[role] = _affine(layer, role, width)
    attention = layer.get_submodule(".".join(layer._attention))
    assert isinstance(attention, SelfAttention)
    heads = matrices[value.role].shape[0] // attention.value_dim
    value_GwD = matrices[value.role].unflatten(0, (heads, -1)).expand(G, -1, -1)
    bias_Gw = biases[value.role].unflatten(0, (heads, -1)).expand(G, -1)
    matrices[output.role], biases[output.role] = _affine(layer, output.role, block.heads * value_GwD.shape[1])
    output_DHw = matrices[output.role].unflatten(1, (block.heads, -1))
    value_GdD, bias_Gd, output_DHd = _to_head_dim(value_GwD, bias_Gw, output_DHw, d, stored)
    matrices |= {value.role: value_GdD.flatten(0, 1), output.role: output_DHd.flatten(1)}
    biases[value.role] = bias_Gd.flatten()
    for role, matrix in matrices.items():
        tensors[f"{role}.weight"] = matrix
        if geometry.matrices[role].bias:
            tensors[f"{role}.bias"] = biases[role]
        elif biases[role].any():
            raise InputError(f"layer: {role} has a bias, which a dense {geometry.model_type} model has no place for")
    return tensors


def pad_mlp(weights: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """With channels of zeros up to `width`: they give nothing, whatever the activation."""
    padded = dict(weights)
    for role in ("gate", "up"):
        if f"{role}.weight" in weights:
            missing = width - weights[f"{role}.weight"].shape[0]
            padded[f"{role}.weight"] = functional.pad(weights[f"{role}.weight"], (0, 0, 0, missing))
            if f"{role}.bias" in weights:
                padded[f"{role}.bias"] = functional.pad(weights[f"{role}.bias"], (0, missing))
    padded["down.weight"] = functional.pad(weights["down.weight"], (0, width - weights["down.weight"].shape[1]))
    return padded


def _affine(layer: DecoderLayer, role: str, width: int) -> tuple[Tensor, Tensor]:
    """Matrix (out, in) and bias (out) of a role."""
    unit_1II = torch.eye(width, dtype=torch.float64)[None]
    images_II, bias = (
        layer._apply_role(role, x, layer._given(role, x, {}))[0] for x in (unit_1II, torch.zeros_like(unit_1II[:, :1]))
    )
    return (images_II - bias).T.contiguous(), bias[0]


def _to_head_dim(
    value_GwD: Tensor, bias_Gw: Tensor, output_DHw: Tensor, head_dim: int, stored: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, their bias and the output projection with heads of d numbers, the same products of both."""
    missing = head_dim - value_GwD.shape[1]
    if missing >= 0:
        return (
            functional.pad(value_GwD, (0, 0, 0, missing)),
            functional.pad(bias_Gw, (0, missing)),
            functional.pad(output_DHw, (0, missing)),
        )
    groups, heads = len(value_GwD), output_DHw.shape[1]
    stacked_GRw = output_DHw.permute(1, 0, 2).unflatten(0, (groups, -1)).flatten(1, 2)
    left, values, right = torch.linalg.svd(stacked_GRw, full_matrices=False)
    lost = (values[:, head_dim:].square().sum() / values.square().sum()).sqrt().item()
    if lost > ROUNDINGS * torch.finfo(stored).eps:
        raise InputError(
            f"values of {value_GwD.shape[1]} numbers a head, of a higher rank than {head_dim} (share {lost:.1e} would "
            "be lost): no dense model of the family does the same"
        )
    rebuilt_Gdw = right[:, :head_dim]
    output_GRd = left[:, :, :head_dim] * values[:, None, :head_dim]
    output_DHd = output_GRd.unflatten(1, (heads // groups, -1)).flatten(0, 1).permute(1, 0, 2)
    return rebuilt_Gdw @ value_GwD, (rebuilt_Gdw @ bias_Gw[..., None])[..., 0], output_DHd
