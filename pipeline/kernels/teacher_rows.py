"""A teacher's distribution over the next token in a few bytes: its likeliest tokens, and samples of the rest.

docs/methods.md#healing. The divergence has two parts. The first is that of a distribution over the likeliest tokens and
one class of all others; it is computed exactly. The second is the divergence among the others, times their mass r. It
is estimated from samples, drawn by their probability at evenly spaced places of the cumulative distribution: with p and
q relative to the mass of the others, and e = q / p of a sample, by the mean of -log e + c (e - 1). Its expectation and
that of its gradient are the same for any c, because e is 1 on average. The noise is least at c = 1 / mean(e^2): near 1
for a student that is close to the teacher, where each term then has no gradient, and near 0 for one that is far.

Legend: T tokens, V vocabulary, K likeliest tokens, R samples of the rest, N = K + R, W bytes of a row.
"""

import math
from typing import Any

import torch
from torch import Tensor

FORMAT = 1  # of a row
LIKELIEST = 16
SAMPLES = 22
ID_BYTES = 3
LOG_BYTES = 2
LOG_STEPS = 2048  # in a nat: probabilities down to exp(-32), to 1 part in 4096
GOLDEN = 0.6180339887498949
MOST_VOCABULARY = 256**ID_BYTES


def row_bytes(vocabulary: int) -> int:
    """Return the bytes W of a row: 192 for all but the smallest vocabularies."""
    return (_likeliest(vocabulary) + SAMPLES) * (ID_BYTES + LOG_BYTES) + LOG_BYTES


def encode_rows(logits_TV: Tensor, first: int) -> Tensor:
    """Return rows (T, W) uint8 of a teacher's logits. `first`: the number of the first token, which places samples.

    Raises ValueError if the vocabulary has more tokens than ids of three bytes.
    """
    tokens, vocabulary = logits_TV.shape
    if vocabulary > MOST_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocabulary} tokens, more than {MOST_VOCABULARY}")
    log_p_TV = logits_TV.float().log_softmax(dim=1)
    ids_TK = log_p_TV.topk(_likeliest(vocabulary), dim=1).indices
    cumulated_TV = log_p_TV.exp().scatter_(1, ids_TK, 0.0).cumsum(dim=1)
    numbers_T = torch.arange(first + 1, first + 1 + tokens, dtype=torch.float64)
    offset_T = (numbers_T * GOLDEN).frac().to(logits_TV.device, torch.float32)
    even_R = torch.arange(SAMPLES, dtype=torch.float32, device=logits_TV.device)
    places_TR = (even_R + offset_T[:, None]) / SAMPLES * cumulated_TV[:, -1:]
    sampled_TR = torch.searchsorted(cumulated_TV, places_TR, right=True).clamp_(max=vocabulary - 1)
    ids_TN = torch.cat([ids_TK, sampled_TR], dim=1)
    logs_TC = torch.cat([log_p_TV.gather(1, ids_TN), cumulated_TV[:, -1:].log()], dim=1)
    steps_TC = (logs_TC.clamp(min=-32.0) * -LOG_STEPS).round().long().clamp_(0, 256**LOG_BYTES - 1)
    return torch.cat([_bytes(ids_TN, ID_BYTES), _bytes(steps_TC, LOG_BYTES)], dim=1)


def row_divergence(logits_TV: Tensor, rows_TW: Tensor) -> Tensor:
    """Return an estimate of the sum over tokens of KL(teacher‖student), from rows and the student's logits.

    Its gradient is computed with it, in one buffer as large as the logits. It has no second derivative.
    """
    divergence: Tensor = _RowDivergence.apply(logits_TV, rows_TW.to(logits_TV.device))  # type: ignore[no-untyped-call] # torch's
    return divergence


class _RowDivergence(torch.autograd.Function):
    """The divergence of the module's docstring.

    With s the student's distribution over the others alone and q_r their mass, and a = r (c e - 1) / R of a sample, the
    gradient at the logits is q - p of a likeliest token, and s (q_r - r - sum a) of another, plus a of each sample.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, rows_TW: Tensor) -> Tensor:
        kept = _likeliest(logits_TV.shape[1])
        ids_bytes = (kept + SAMPLES) * ID_BYTES
        ids_TN = _numbers(rows_TW[:, :ids_bytes], ID_BYTES)
        logs_TC = _numbers(rows_TW[:, ids_bytes:], LOG_BYTES).float() / -LOG_STEPS
        log_p_TN, log_r_T1 = logs_TC[:, :-1], logs_TC[:, -1:]
        log_q_TV = logits_TV.float().log_softmax(dim=1)
        log_q_TN = log_q_TV.gather(1, ids_TN)
        log_q_TV.scatter_(1, ids_TN[:, :kept], -math.inf)
        largest_T1 = log_q_TV.amax(dim=1, keepdim=True)
        gradient_TV = torch.softmax(log_q_TV, dim=1)
        log_rest_T1 = largest_T1 - gradient_TV.amax(dim=1, keepdim=True).log()
        known_TC = torch.cat([log_p_TN[:, :kept], log_r_T1], dim=1)
        classes_TC = known_TC.log_softmax(dim=1)  # they add up to 1, but for steps
        student_TC = torch.cat([log_q_TN[:, :kept], log_rest_T1], dim=1)
        exact = (classes_TC.exp() * (classes_TC - student_TC)).sum()
        log_e_TR = (log_q_TN - log_rest_T1 - log_p_TN + log_r_T1)[:, kept:]
        e_TR, r_T1 = log_e_TR.exp(), log_r_T1.exp()
        weight = (r_T1.sum() * SAMPLES / (r_T1 * e_TR.square()).sum()).nan_to_num(0.0, 0.0, 0.0)
        if ctx.needs_input_grad[0]:
            excess_TC = student_TC.exp() - classes_TC.exp()
            samples_TR = (weight * e_TR - 1.0) * (r_T1 / SAMPLES)
            gradient_TV *= excess_TC[:, -1:] - samples_TR.sum(dim=1, keepdim=True)
            gradient_TV.scatter_(1, ids_TN[:, :kept], excess_TC[:, :-1])
            gradient_TV.scatter_add_(1, ids_TN[:, kept:], samples_TR)
            ctx.save_for_backward(gradient_TV)
        return exact + (r_T1 / SAMPLES * (weight * (e_TR - 1.0) - log_e_TR)).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient_TV,) = ctx.saved_tensors
        return gradient_TV * scale, None


def full_divergence(teacher_TV: Tensor, logits_TV: Tensor) -> Tensor:
    """Return the sum over tokens of KL(teacher‖student) from the logits of both."""
    teacher_TV, student_TV = (logits.float().log_softmax(dim=1) for logits in (teacher_TV, logits_TV))
    return (teacher_TV.exp() * (teacher_TV - student_TV)).sum()


def _likeliest(vocabulary: int) -> int:
    """Return K: at least one token is left for the rest."""
    return min(LIKELIEST, vocabulary - 1)


def _bytes(numbers_TC: Tensor, width: int) -> Tensor:
    """Return the low `width` bytes of each number, the lowest first: (T, C·width) uint8."""
    return torch.stack([(numbers_TC >> (8 * at)) & 255 for at in range(width)], dim=2).flatten(1).to(torch.uint8)


def _numbers(bytes_TB: Tensor, width: int) -> Tensor:
    """Return the numbers (T, B / width) int64 of `_bytes`."""
    parts = bytes_TB.long().unflatten(1, (-1, width)).unbind(2)
    return sum((part << (8 * at) for at, part in enumerate(parts)), torch.zeros_like(parts[0]))
