"""Creates compressed tensors from a source model, and source-shaped tensors that must compute the same."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tests.serving.serving_sources import describe, role_name

# One per layer: uneven ranks, a layer with every form, a layer left dense.
MIXED: list[dict[str, Any]] = [
    {role: {"form": "head_pca", "rank": 5} for role in ("v", "o")},
    {
        **{role: {"form": "head_pca", "rank": 3} for role in ("v", "o")},
        **{role: {"form": "pruned", "rank": 31} for role in ("gate", "up", "down")},
        "q": {"form": "head_low_rank", "rank": 6},
        "k": {"form": "head_low_rank", "rank": 4},
    },
    {},
]


def forms_for(source: PreTrainedConfig, forms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `forms` without the roles that the family lacks."""
    modules = describe(source)["block"]["modules"]
    return [{role: spec for role, spec in layer.items() if role in modules} for layer in forms]


def compress(
    source: PreTrainedConfig, tensors: dict[str, Tensor], forms: list[dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a lamina checkpoint with these forms, and source-shaped tensors that compute the same.

    Bases and kept channels are random, because the tests check arithmetic, not quality.
    """
    ours, reference = dict(tensors), dict(tensors)
    for layer_idx, layer in enumerate(forms):
        generator = torch.Generator().manual_seed(layer_idx)
        for role, spec in layer.items():
            name = role_name(source, layer_idx, role)
            if spec["form"] == "head_low_rank":
                _head_low_rank(source, ours, reference, name, spec["rank"])
        if layer.get("v", {}).get("form") == "head_pca":
            names = [role_name(source, layer_idx, role) for role in ("v", "o")]
            _head_pca(source, ours, reference, names, layer["v"]["rank"], generator)
        if layer.get("down", {}).get("form") == "pruned":
            names = [role_name(source, layer_idx, role) for role in ("gate", "up", "down") if role in layer]
            _pruned(ours, reference, names, layer["down"]["rank"], generator)
    return ours, reference


def _head_pca(
    source: PreTrainedConfig,
    ours: dict[str, Tensor],
    reference: dict[str, Tensor],
    names: list[str],
    rank: int,
    generator: torch.Generator,
) -> None:
    """Store v (G·r, D) and o (D, H·r) in a random orthonormal basis per KV head; the reference has zeros for the
    rest."""
    fields = describe(source)
    heads, kv_heads, head_dim = (fields[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    basis_Gdr = torch.linalg.qr(torch.randn(kv_heads, head_dim, head_dim, generator=generator))[0][..., :rank]
    basis_Hdr = basis_Gdr.repeat_interleave(heads // kv_heads, dim=0)
    v, o = names
    for suffix in (".weight", ".bias"):
        if v + suffix in ours:
            rows_Gdx = ours[v + suffix].reshape(kv_heads, head_dim, -1)
            latent_Grx = basis_Gdr.mT @ rows_Gdx
            padded_Gdx = torch.nn.functional.pad(latent_Grx, (0, 0, 0, head_dim - rank))
            shape = ours[v + suffix].shape[1:]
            ours[v + suffix] = latent_Grx.reshape(-1, *shape).contiguous()
            reference[v + suffix] = padded_Gdx.reshape(-1, *shape).contiguous()
    columns_DHd = ours[o + ".weight"].reshape(-1, heads, head_dim)
    latent_DHr = torch.einsum("xhd,hdr->xhr", columns_DHd, basis_Hdr)
    reference[o + ".weight"] = torch.nn.functional.pad(latent_DHr, (0, head_dim - rank)).flatten(1).contiguous()
    ours[o + ".weight"] = latent_DHr.flatten(1).contiguous()


def _pruned(
    ours: dict[str, Tensor], reference: dict[str, Tensor], names: list[str], rank: int, generator: torch.Generator
) -> None:
    *readers, down = names
    width = ours[down + ".weight"].shape[1]
    kept = torch.randperm(width, generator=generator)[:rank].sort().values
    mask_N = torch.zeros(width).index_fill(0, kept, 1.0)
    for reader in readers:
        for suffix in (".weight", ".bias"):
            if reader + suffix in ours:
                ours[reader + suffix] = ours[reader + suffix][kept].contiguous()
    reference[down + ".weight"] = ours[down + ".weight"] * mask_N
    ours[down + ".weight"] = ours[down + ".weight"][:, kept].contiguous()


def _head_low_rank(
    source: PreTrainedConfig, ours: dict[str, Tensor], reference: dict[str, Tensor], name: str, rank: int
) -> None:
    """Store P.first.weight (n·r, D), P.second (n, d, r): the leading singular triples of each head."""
    weight_ndD = ours.pop(name + ".weight").reshape(-1, describe(source)["head_dim"], describe(source)["hidden_size"])
    u, s, vh = torch.linalg.svd(weight_ndD, full_matrices=False)
    first_nrD, second_ndr = vh[:, :rank], u[..., :rank] * s[:, None, :rank]
    ours[name + ".first.weight"] = first_nrD.flatten(0, 1).contiguous()
    ours[name + ".second"] = second_ndr.contiguous()
    reference[name + ".weight"] = (second_ndr @ first_nrD).flatten(0, 1)
