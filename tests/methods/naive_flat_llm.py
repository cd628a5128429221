"""Implements docs/methods.md#flat-llm naively: head by head in float64, with loops and no shortcuts.

D hidden, H query heads, G KV heads, d head_dim, N channels, r and k what is kept, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leading(moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading eigenvectors as columns, and all eigenvalues, descending."""
    values, vectors = torch.linalg.eigh(moment)
    order = torch.argsort(values, descending=True)
    return vectors[:, order[:rank]], values[order]


def root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T


def projections(
    moments_Gdd: Tensor, weight_o: Tensor, heads: int, rank: int, weighting: str
) -> tuple[list[Tensor], float]:
    """Return P_g (d × d) with ŷ = P_g y for each KV head, and the relative squared error:

    dropped over all eigenvalues.
    """
    groups, d, _ = moments_Gdd.shape
    found, dropped, whole = [], 0.0, 0.0
    for g in range(groups):
        if weighting == "none":
            basis, values = leading(moments_Gdd[g], rank)
            found.append(basis @ basis.T)
        else:
            gram = torch.zeros(d, d, dtype=torch.float64)
            for h in range(heads):
                if h // (heads // groups) == g:
                    block = weight_o[:, h * d : (h + 1) * d]
                    gram += block.T @ block
            n = root(gram)
            basis, values = leading(n @ moments_Gdd[g] @ n, rank)
            found.append(torch.linalg.inv(n) @ basis @ basis.T @ n)
        dropped += values[rank:].sum().item()
        whole += values.sum().item()
    return found, dropped / whole


def leverage(moment: Tensor, count: int, ridge: float) -> list[int]:
    """Return the channels of the highest scores of diag(C (C + λI)⁻¹), ascending."""
    lam = ridge * moment.diagonal().mean()
    scores = (moment @ torch.linalg.inv(moment + lam * torch.eye(len(moment), dtype=torch.float64))).diagonal()
    return sorted(torch.argsort(scores, descending=True)[:count].tolist())


def refit(moment: Tensor, down: Tensor, kept: list[int]) -> tuple[Tensor, float]:
    """Return W̃_down = W C[:,S] C[S,S]⁻¹, and the output error tr(E C Eᵀ) over tr(W C Wᵀ)."""
    new = down @ moment[:, kept] @ torch.linalg.inv(moment[kept][:, kept])
    residual = down.clone()
    for column, channel in enumerate(kept):
        residual[:, channel] -= new[:, column]
    error = torch.trace(residual @ moment @ residual.T) / torch.trace(down @ moment @ down.T)
    return new, error.item()


def eliminate(moment: Tensor, down: Tensor, count: int) -> list[int]:
    """Remove, one after another, the channel whose removal adds the least error after the best refit."""
    kept = list(range(len(moment)))
    while len(kept) > count:
        errors = [refit(moment, down, [other for other in kept if other != channel])[1] for channel in kept]
        kept.pop(min(range(len(kept)), key=errors.__getitem__))
    return kept
