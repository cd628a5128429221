"""Dense weights of compressed layers: padding and projecting change no output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.errors import InputError
from pipeline.checkpoint.dense_weights import _to_head_dim, pad_latent, pad_mlp, pad_values
from pipeline.families.blocks import LatentAttentionBlock
from pipeline.families.foreign import latent_attention
from tests.families.geometries import llama
from tests.tensors import randn

G, H, D = 2, 4, 6  # key/value heads, query heads, hidden size
FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3", "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "q_lora_rank": None,
}  # fmt: skip


def products(value_GwD: Tensor, bias_Gw: Tensor, output_DHw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices (H, D, D) and vectors (H, D) from a layer's inputs to each head's part of its output."""
    group = torch.arange(H) // (H // G)
    matrices_HDD = torch.einsum("dhw,hwe->hde", output_DHw, value_GwD[group])
    return matrices_HDD, torch.einsum("dhw,hw->hd", output_DHw, bias_Gw[group])


@pytest.mark.parametrize(("width", "head_dim"), [(3, 5), (4, 4), (1, 2)])
def test_narrow_value_heads_are_padded(width: int, head_dim: int) -> None:
    before = randn(G, width, D), randn(G, width), randn(D, H, width)
    after = _to_head_dim(*before, head_dim, torch.float32)
    assert [tuple(each.shape) for each in after] == [(G, head_dim, D), (G, head_dim), (D, H, head_dim)]
    assert all(torch.equal(*pair) for pair in zip(products(*after), products(*before), strict=True))


def wide(head_dim: int, beyond: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return value heads of 5 numbers whose outputs span `head_dim` directions, but for a part `beyond`."""
    output_DHw = torch.zeros(D, H, 5, dtype=torch.float64)
    for group in range(G):
        basis_dw = torch.linalg.qr(randn(5, 5 + group)[:, :5]).Q[:head_dim]
        heads = slice(group * H // G, (group + 1) * H // G)
        output_DHw[:, heads] = randn(D, H // G, head_dim) @ basis_dw + beyond * randn(D, H // G, 5)
    return randn(G, 5, D), randn(G, 5), output_DHw


@pytest.mark.parametrize("head_dim", [1, 2, 4])
def test_wide_value_heads_of_few_directions_are_projected(head_dim: int) -> None:
    before = wide(head_dim, 0.0)
    after = _to_head_dim(*before, head_dim, torch.float32)
    assert [tuple(each.shape) for each in after] == [(G, head_dim, D), (G, head_dim), (D, H, head_dim)]
    for found, expected in zip(products(*after), products(*before), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rounding_errors_of_the_stored_dtype_are_no_direction() -> None:
    parts = wide(2, 1e-4)
    _to_head_dim(*parts, 2, torch.bfloat16)
    with pytest.raises(InputError, match="of a higher rank than 2"):
        _to_head_dim(*parts, 2, torch.float32)


def test_an_output_projection_of_zeros_stays_zero() -> None:
    value_GwD, bias_Gw, output_DHw = wide(2, 0.0)
    after = _to_head_dim(value_GwD, bias_Gw, torch.zeros_like(output_DHw), 2, torch.float32)
    assert not after[2].any()
    assert all(each.isfinite().all() for each in after)


@pytest.mark.parametrize("missing", [0, 1, 7])
def test_channels_that_pad_an_mlp_change_nothing(missing: int) -> None:
    (block,) = llama("biased").layers[0].mlps
    kept, hidden = 5, 3
    weights = {f"{role}.weight": randn(kept, hidden) for role in ("gate", "up")}
    weights |= {"down.weight": randn(hidden, kept), "gate.bias": randn(kept), "up.bias": randn(kept)}
    weights["down.bias"] = randn(hidden)
    padded = pad_mlp(weights, block, kept + missing)
    assert padded["down.weight"].shape == (hidden, kept + missing)
    assert padded["gate.bias"].shape == (kept + missing,)
    assert torch.equal(padded["down.bias"], weights["down.bias"])

    def output(of: dict[str, Tensor], x_TD: Tensor) -> Tensor:
        gate, up = (x_TD @ of[f"{role}.weight"].T + of[f"{role}.bias"] for role in ("gate", "up"))
        return (torch.nn.functional.silu(gate) * up) @ of["down.weight"].T + of["down.bias"]

    x_TD = randn(4, hidden)
    torch.testing.assert_close(output(padded, x_TD), output(weights, x_TD), rtol=1e-13, atol=1e-13)


def latent_block() -> LatentAttentionBlock:
    block = latent_attention(FIELDS, D, H, ("kv_a_proj_with_mqa",)).block
    assert block is not None
    return block


def test_zeros_that_pad_a_latent_change_neither_keys_nor_values() -> None:
    (latent,) = latent_block().latents
    kept, width, rotated = 3, 5, FIELDS["qk_rope_head_dim"]
    writer, reader, norm = latent.writer.role, latent.reader.role, f"{latent.norm}.weight"
    weights = {
        f"{writer}.weight": randn(kept + rotated, D), f"{writer}.bias": randn(kept + rotated),
        norm: randn(kept), f"{reader}.weight": randn(28, kept), "other": randn(1),
    }  # fmt: skip
    padded = pad_latent(weights, latent, width)
    assert padded[f"{writer}.weight"].shape == (width + rotated, D)
    assert padded["other"] is weights["other"]

    def outputs(of: dict[str, Tensor], x_TD: Tensor) -> tuple[Tensor, Tensor]:
        written_T = x_TD @ of[f"{writer}.weight"].T + of[f"{writer}.bias"]
        latent_TL, rotated_TR = written_T[:, :-rotated], written_T[:, -rotated:]
        root_T = (latent_TL.square().mean(-1, keepdim=True) + 1e-3).sqrt()  # a large epsilon, which must not matter
        return (of[norm] * latent_TL / root_T) @ of[f"{reader}.weight"].T, rotated_TR

    x_TD = randn(4, D)
    for found, expected in zip(outputs(padded, x_TD), outputs(weights, x_TD), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_values_of_latent_attention_are_padded_behind_each_head_s_keys(missing: int) -> None:
    block, kept, nope = latent_block(), 2, FIELDS["qk_nope_head_dim"]
    weights = {"kv_b_proj.weight": randn(H * (nope + kept), 5), "o_proj.weight": randn(D, H * kept)}
    padded = pad_values(weights, block, kept + missing)
    before_HXL = weights["kv_b_proj.weight"].unflatten(0, (H, -1))
    after_HXL = padded["kv_b_proj.weight"].unflatten(0, (H, -1))
    assert torch.equal(after_HXL[:, : nope + kept], before_HXL)
    assert not after_HXL[:, nope + kept :].any()
    values = [
        torch.einsum("dhw,hwl->dhl", of["o_proj.weight"].unflatten(1, (H, -1)), each_HXL[:, nope:])
        for of, each_HXL in ((weights, before_HXL), (padded, after_HXL))
    ]
    torch.testing.assert_close(values[1], values[0], rtol=1e-13, atol=1e-13)
