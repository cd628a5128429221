"""Sums over logits: what tokens cost, and how far two models are apart.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.units import Divergence

LogitRows = tuple[tuple[Tensor, ...], Tensor]  # logits (T, V) of each of some models, and the tokens (T,) that came


def summed_loss(parts: Iterable[LogitRows]) -> tuple[float, int]:
    """Negative log likelihood of the tokens in nats under one model, and their number."""
    total, count = 0.0, 0
    for (logits_TV,), target_T in parts:
        total += functional.cross_entropy(logits_TV, target_T, reduction="none").double().sum().item()
        count += len(target_T)
    return total, count


def summed_divergence(parts: Iterable[LogitRows]) -> Divergence:
    """KL(dense‖compressed), and the negative log likelihood under either."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for (dense_TV, compressed_TV), target_T in parts:
        dense_TV, compressed_TV = (logits.log_softmax(dim=1) for logits in (dense_TV, compressed_TV))
        divergence_T = (dense_TV.exp() * (dense_TV - compressed_TV)).sum(dim=1, dtype=torch.float64)
        losses = [-log_p.gather(1, target_T[:, None]).double().sum() for log_p in (dense_TV, compressed_TV)]
        sums += torch.stack([divergence_T.sum(), *losses]).cpu()
        count += len(target_T)
    divergence, dense_loss, compressed_loss = sums.tolist()
    return Divergence(divergence, dense_loss, compressed_loss, count)
