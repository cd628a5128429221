"""Rebuilds the dense weights of a compressed layer from any of its forms.

Legend: D hidden, H query heads, G key/value heads, d head_dim, w width of a value head, N MLP width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamina.decoder_layer_lamina import DecoderLayer, SelfAttention
from manifests.errors import InputError
from pipeline.families.blocks import AttentionBlock, Copied, Latent, LatentAttentionBlock, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry

ROUNDINGS = 64  # differences up to this many rounding errors of the stored numbers count as zero


@torch.inference_mode()
def dense_weights(layer: DecoderLayer, geometry: LayerGeometry, stored: torch.dtype) -> dict[str, Tensor]:
    """Return `role.weight` and `role.bias` of the dense layer, in float64. MLPs and latents keep their widths.

    Every projection is linear in any form, so its matrix is its output for the unit vectors. Value heads get width d:
    narrower ones are padded with zeros, wider ones (absorbed latents) are projected to the d directions that they span.
    `stored`: the coarsest dtype of the factors of v and o. Raises InputError if the rank of value heads is above d.
    """
    layer = layer.to(torch.float64)
    weights = {
        f"{norm.role}.{name}": tensor
        for norm in geometry.norms
        for name, tensor in layer.role(norm.role).state_dict().items()
    }
    weights |= {
        f"{each.role}.{name}": parameter
        for each in geometry.copied
        for name, parameter in _copied(layer, each, geometry.latent_attention).items()
    }
    matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    readers = (role for block in geometry.attentions for role in block.roles[:-1])
    for role in (*readers, *(role for mlp in geometry.mlps for role in mlp.roles)):
        fed = next((other for other in matrices if geometry.matrices[other].feeds == geometry.matrices[role].reads), "")
        width = matrices[fed].shape[0] if fed else geometry.hidden
        matrices[role], biases[role] = _affine(layer, role, width)
    for block in geometry.attentions:
        _add_output_(matrices, biases, layer, block, stored)
    for role, matrix in matrices.items():
        weights[f"{role}.weight"] = matrix
        if geometry.matrices[role].bias:
            weights[f"{role}.bias"] = biases[role]
        elif biases[role].any():
            raise InputError(f"layer: {role} has a bias, which a dense {geometry.model_type} model cannot have")
    return weights


def _add_output_(
    matrices: dict[str, Tensor],
    biases: dict[str, Tensor],
    layer: DecoderLayer,
    block: AttentionBlock,
    stored: torch.dtype,
) -> None:
    """Add the output projection, and change value heads to width d."""
    G, d = block.kv_heads, block.head_dim
    value, output = block.value_output
    attention = layer.get_submodule(".".join(layer._attention))
    assert isinstance(attention, SelfAttention)
    heads = matrices[value.role].shape[0] // attention.value_dim
    value_GwD = matrices[value.role].unflatten(0, (heads, -1)).expand(G, -1, -1)
    bias_Gw = biases[value.role].unflatten(0, (heads, -1)).expand(G, -1)
    matrices[output.role], biases[output.role] = _affine(layer, output.role, block.heads * value_GwD.shape[1])
    output_DHw = matrices[output.role].unflatten(1, (block.heads, -1))
    value_GdD, bias_Gd, output_DHd = _to_head_dim(value_GwD, bias_Gw, output_DHw, d, stored)
    matrices[value.role], matrices[output.role] = value_GdD.flatten(0, 1), output_DHd.flatten(1)
    biases[value.role] = bias_Gd.flatten()


def pad_mlp(weights: dict[str, Tensor], block: MLPBlock, width: int) -> dict[str, Tensor]:
    """Return the weights with an MLP padded to `width` by zero channels, which do not change its output."""
    missing = width - weights[block.writer.weight_key].shape[1]
    paddings: dict[str, tuple[int, ...]] = {block.writer.weight_key: (0, missing)}
    for reader in block.readers:
        paddings |= {reader.weight_key: (0, 0, 0, missing), reader.bias_key: (0, missing)}
    padded = {key: functional.pad(weights[key], padding) for key, padding in paddings.items() if key in weights}
    return {**weights, **padded}


def _copied(layer: DecoderLayer, copied: Copied, attention: LatentAttentionBlock | None) -> dict[str, Tensor]:
    """Return the tensors of a module outside of the blocks, multiplied out if it is factored."""
    module = layer.role(copied.role)
    if attention is None or copied.role != attention.writer.role or isinstance(module, nn.Linear):
        return {name: module.get_parameter(name) for name, _ in copied.shapes}
    latent = next(latent for latent in attention.latents if latent.cached)
    written = cast(nn.Linear, layer.role(latent.reader.role)).weight.shape[0]
    matrix, bias = _affine(layer, copied.role, written - attention.heads * attention.key_width)
    return {name: matrix if name == "weight" else bias for name, _ in copied.shapes}


def pad_latent(weights: dict[str, Tensor], latent: Latent, width: int) -> dict[str, Tensor]:
    """Return the weights with a latent padded to `width` by zeros, which its readers ignore.

    The zeros lower the mean square by which the norm divides. The writer is scaled to compensate, and the norm's weight
    to compensate for the writer.
    """
    kept = len(weights[f"{latent.norm}.weight"])
    missing, scale = width - kept, (width / kept) ** 0.5
    padded = {
        f"{latent.norm}.weight": functional.pad(weights[f"{latent.norm}.weight"] / scale, (0, missing)),
        latent.reader.weight_key: functional.pad(weights[latent.reader.weight_key], (0, missing)),
    }
    for key in (key for key in (latent.writer.weight_key, latent.writer.bias_key) if key in weights):
        rows = weights[key]
        padded[key] = torch.cat((scale * rows[:kept], rows.new_zeros(missing, *rows.shape[1:]), rows[kept:]))
    return {**weights, **padded}


def pad_values(weights: dict[str, Tensor], attention: LatentAttentionBlock, width: int) -> dict[str, Tensor]:
    """Return the weights with each value head of latent attention padded to `width` by zeros."""
    (latent,) = (latent for latent in attention.latents if latent.cached)
    reader, writer = latent.reader.weight_key, attention.writer.weight_key
    missing = width - weights[writer].shape[1] // attention.heads
    reader_HXL = weights[reader].unflatten(0, (attention.heads, -1))
    writer_DHw = weights[writer].unflatten(1, (attention.heads, -1))
    return {
        **weights,
        reader: functional.pad(reader_HXL, (0, 0, 0, missing)).flatten(0, 1),
        writer: functional.pad(writer_DHw, (0, missing)).flatten(1),
    }


def _affine(layer: DecoderLayer, role: str, width: int) -> tuple[Tensor, Tensor]:
    """Return the matrix (out, in) and the bias (out) of a role."""
    unit_1II = torch.eye(width, dtype=torch.float64)[None]
    images_II, bias = (
        layer._apply_role(role, x, layer._source_output(role, x, {}))[0]
        for x in (unit_1II, torch.zeros_like(unit_1II[:, :1]))
    )
    return (images_II - bias).T.contiguous(), bias[0]


def _to_head_dim(
    value_GwD: Tensor, bias_Gw: Tensor, output_DHw: Tensor, head_dim: int, stored: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, their bias and the output projection with heads of width d and the same product."""
    missing = head_dim - value_GwD.shape[1]
    if missing >= 0:
        return (
            functional.pad(value_GwD, (0, 0, 0, missing)),
            functional.pad(bias_Gw, (0, missing)),
            functional.pad(output_DHw, (0, missing)),
        )
    groups, heads = len(value_GwD), output_DHw.shape[1]
    stacked_GRw = output_DHw.permute(1, 0, 2).unflatten(0, (groups, -1)).flatten(1, 2)
    left_GRk, values_Gk, right_Gkw = torch.linalg.svd(stacked_GRw, full_matrices=False)
    lost = (values_Gk[:, head_dim:].square().sum() / values_Gk.square().sum()).sqrt().item()
    if lost > ROUNDINGS * torch.finfo(stored).eps:
        raise InputError(
            f"values of {value_GwD.shape[1]} numbers per head, of a higher rank than {head_dim} (share {lost:.1e} "
            "would be lost): a dense model of the family cannot hold them"
        )
    basis_Gdw = right_Gkw[:, :head_dim]
    output_GRd = left_GRk[:, :, :head_dim] * values_Gk[:, None, :head_dim]
    output_DHd = output_GRd.unflatten(1, (heads // groups, -1)).flatten(0, 1).permute(1, 0, 2)
    return basis_Gdw @ value_GwD, (basis_Gdw @ bias_Gw[..., None])[..., 0], output_DHd
