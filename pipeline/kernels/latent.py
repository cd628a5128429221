"""Keys and values of grouped-query attention as one latent per token. docs/methods.md#mla.

A rotation by position multiplies each pair of key dimensions, read as one complex number, by e^{iθn}. It commutes with
complex maps among the heads' numbers of one frequency, so that one complex number of all heads can carry a frequency.

Legend: T tokens, D hidden, H query heads, G key/value heads, d head_dim, J = d/2 pairs, C = G·d, p rotated dimensions
that all heads share, r latents, W distances, m outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite
from pipeline.kernels.sensitivity import Factored, factored

WINDOW, SEQUENCES = 256, 16  # tokens of a sequence on which attention by distance is estimated, and their number
ROTATED_GAIN = 0.5  # a pair is rotated by another pair's frequency only if this saves so much of its unrotated loss
CLIPPED = 1e-9  # of the largest eigenvalue of a metric of few numbers
FIT_STEPS, HISTORY = 30, 20  # of L-BFGS
RIDGE = 1e-7  # of the mean square of normed latents, which is 1
BALANCE_STEPS = 1000
LATENT_RMS = 8.0  # of latents before their norm: the norm's epsilon, which differs between engines, is then negligible


class SplitKeys(NamedTuple):
    """Keys as rotated dimensions that all heads share, and a rest per head that is not rotated.

    Attributes:
        shared: (p, D), interleaved: rows 2i and 2i + 1 are rotated by frequency i.
        read: (G, p, d): the map by which the queries of a group read the shared dimensions.
        rest: (C, D), the keys that the unchanged queries read beside them.
        loss: the loss from the missing rotations, in nats per token.
    """

    shared: Tensor
    read: Tensor
    rest: Tensor
    loss: float


class FittedLatents(NamedTuple):
    """A latent z = encode x of which keys and values are decode z / rms(z).

    Attributes:
        encode: (r, D).
        decode: (m, r).
        loss: the loss from errors of the outputs on the sample, in nats per token; `before`: before the fit.
    """

    encode: Tensor
    decode: Tensor
    loss: float
    before: float


def distance_shares(
    sample_TD: Tensor, query_QD: Tensor, key_CD: Tensor, groups: int, frequencies_J: Tensor, scale: float
) -> Tensor:
    """Estimate the share of attention that each group's queries pay to each distance: (G, W), rows sum to 1. float64.

    Consecutive sample tokens form the sequences. Attention is causal, with the rotations of `frequencies_J`. `scale`
    multiplies its scores.
    """
    window = min(WINDOW, len(sample_TD))
    count = min(SEQUENCES, len(sample_TD) // window)
    step = len(sample_TD) // (count * window)
    chosen_SWD = sample_TD[:: max(1, step)][: count * window].double().view(count, window, -1)
    angles_WJ = torch.arange(window, dtype=torch.float64, device=sample_TD.device)[:, None] * frequencies_J
    turn_W1J = torch.polar(torch.ones_like(angles_WJ), angles_WJ)[:, None]
    pairs = len(frequencies_J)
    hidden = torch.ones(window, window, dtype=torch.bool, device=sample_TD.device).triu(1)
    sums = sample_TD.new_zeros((groups, window), dtype=torch.float64)
    for tokens_WD in chosen_SWD:
        query_WHJ = complex_rows(query_QD.double() @ tokens_WD.T, pairs).permute(2, 0, 1) * turn_W1J
        key_WGJ = complex_rows(key_CD.double() @ tokens_WD.T, pairs).permute(2, 0, 1) * turn_W1J
        key_WHJ = key_WGJ.repeat_interleave(query_WHJ.shape[1] // groups, dim=1)
        scores_HWW = scale * torch.einsum("mhj,nhj->hmn", query_WHJ.conj(), key_WHJ).real
        attention_HWW = scores_HWW.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        by_group_GWW = attention_HWW.unflatten(0, (groups, -1)).sum(dim=1)
        for distance in range(window):
            sums[:, distance] += by_group_GWW.diagonal(-distance, 1, 2).sum(dim=-1)
    return sums / sums.sum(dim=1, keepdim=True)


def turns(frequencies_J: Tensor, shared: int, density: int) -> Tensor:
    """Return the p/2 frequencies of `shared` (p) rotated dimensions: `density` for each step of the source's.

    Both are powers of one base, and each `density`-th is one of the source's.
    """
    if density == 1:
        return frequencies_J[: shared // 2]
    places_I = torch.arange(shared // 2, dtype=torch.float64, device=frequencies_J.device)
    grid_I: Tensor = frequencies_J[1] ** (places_I / density)
    return grid_I


def split_keys(
    key_CD: Tensor, moment_DD: Tensor, gradient_CC: Tensor, frequencies_J: Tensor, turns_I: Tensor, shares_GW: Tensor
) -> SplitKeys:
    """Choose p rotated dimensions, with the p/2 frequencies `turns_I`, of least loss from the other dimensions.

    Each rotates numbers of the source's frequency next to it, the equal ones first; pairs of which no turn is next join
    the turn that saves most of their loss. A pair that is not rotated keeps the mean of its rotation over distances,
    α = Σ_w share_w e^{−iθw}, and one that another frequency rotates the mean of the difference. Of n numbers κ, without
    their earlier turns' part, c = uᴴ Γ^{1/2} κ is rotated, u the leading eigenvector of Γ^{1/2} E[κ κᴴ] Γ^{1/2}, and
    Γ the moment of the gradient at κ times the loss that the rotation saves. Means per token; float64. Raises
    ValueError on NaN or infinity.
    """
    require_finite("keys", key_CD)
    pairs, groups = len(frequencies_J), len(shares_GW)
    moment = moment_DD.to(torch.complex128)
    keys_GJD = complex_rows(key_CD.double(), pairs)
    rest_GJD = keys_GJD.clone()
    gradient_NN = complex_moment(gradient_CC.double(), groups)
    still_GJ = _mean_turn(shares_GW, frequencies_J)
    turned_GJI = torch.stack([_mean_turn(shares_GW, frequencies_J - each) for each in turns_I], -1)
    lost_GJ = (1.0 - still_GJ.abs().square()).clamp_min(0.0)
    left_GJI = (1.0 - turned_GJI.abs().square()).clamp_min(0.0)
    gain_GJI = lost_GJ[..., None] - left_GJI
    shared_ID = keys_GJD.new_zeros((len(turns_I), key_CD.shape[1]))
    read_GIJ = keys_GJD.new_zeros((groups, len(turns_I), pairs))
    wrong_GJD = torch.zeros_like(keys_GJD)  # rotated by a frequency near their own
    for turn, members_M in _members(gain_GJI.mean(dim=0), lost_GJ.mean(dim=0), frequencies_J, turns_I):
        keys_ND = rest_GJD[:, members_M].flatten(0, 1)
        index_N = (torch.arange(groups, device=members_M.device)[:, None] * pairs + members_M).flatten()
        gain_N = gain_GJI[:, members_M, turn].flatten().clamp_min(0.0).sqrt().to(torch.complex128)
        metric_NN = gain_N[:, None] * gradient_NN[index_N][:, index_N] * gain_N
        encode_N, decode_N = _leading(metric_NN, keys_ND @ moment @ keys_ND.mH)
        shared_ID[turn] = encode_N @ keys_ND
        part_GMD = (decode_N[:, None] * shared_ID[turn]).view(groups, len(members_M), -1)
        rest_GJD[:, members_M] -= part_GMD
        left_GM = left_GJI[:, members_M, turn]
        wrong_GJD[:, members_M] += part_GMD * left_GM.sqrt()[..., None]
        read_GIJ[:, turn, members_M] = decode_N.view(groups, -1) * turned_GJI[:, members_M, turn]
    change_GJD = rest_GJD * lost_GJ.sqrt()[..., None]
    loss = _turn_loss(change_GJD, moment, gradient_NN) + _turn_loss(wrong_GJD, moment, gradient_NN)
    return SplitKeys(
        torch.stack((shared_ID.real, shared_ID.imag), dim=1).flatten(0, 1),
        read_rows(read_GIJ),
        torch.cat(((rest := rest_GJD * still_GJ[..., None]).real, rest.imag), dim=1).flatten(0, 1),
        loss,
    )


def fit_latents(
    sample_TD: Tensor, moment_DD: Tensor, outputs_mD: Tensor, metric_mm: Tensor, encode_rD: Tensor
) -> FittedLatents:
    """Fit r latents and their decoder after an RMS norm on a sample, starting from a first choice of latents.

    Minimises ½ E[eᵀ G e], e = Y x − B N(A x), N(z) = z / rms(z), over A by L-BFGS. B is the least squares fit, which is
    the best for any G. A begins as uncorrelated latents of mean square 1, each scaled so that the norm of all varies
    least. D latents begin as the scaled inputs instead if that loses less: if x is the output of an RMS norm, the
    scales undo its gains, and nothing is lost. float64. Raises ValueError on NaN or infinity.
    """
    require_finite("sample", sample_TD)
    moment, metric = factored(moment_DD), factored(metric_mm)
    white_TD = _whitened(sample_TD.double(), moment)
    outputs_Tm = sample_TD.double() @ outputs_mD.double().T
    weighted_Tm = outputs_Tm @ metric.factor * metric.scale**0.5
    start_rD = encode_rD.double() @ moment.factor * moment.scale**0.5
    start_rD = _uncorrelated(start_rD)
    start_rD = start_rD * _balance((white_TD @ start_rD.T).square())[:, None].sqrt()
    if len(start_rD) == len(moment_DD) and (scales_D := _level(sample_TD.double())) is not None:
        whole_DD = scales_D[:, None] * moment.factor * moment.scale**0.5
        start_rD = min(start_rD, whole_DD, key=lambda rows: _loss_and_slope(rows, white_TD, weighted_Tm)[0])
    parameter = start_rD.clone()
    optimizer = torch.optim.LBFGS(
        [parameter], max_iter=FIT_STEPS, history_size=HISTORY, line_search_fn="strong_wolfe", tolerance_grad=1e-12,
        tolerance_change=1e-12,
    )  # fmt: skip
    before, _ = _loss_and_slope(parameter, white_TD, weighted_Tm)
    unit = 1.0 / before if before > 0.0 else 1.0

    def closure() -> Tensor:
        loss, parameter.grad = _loss_and_slope(parameter, white_TD, weighted_Tm)
        parameter.grad.mul_(unit)
        return white_TD.new_tensor(loss * unit)

    optimizer.step(closure)
    loss, _ = _loss_and_slope(parameter, white_TD, weighted_Tm)
    if not loss < before:
        parameter, loss = start_rD, before
    latent_Tr = white_TD @ parameter.T
    normed_Tr, rms_T1 = _normed(latent_Tr)
    decode_mr = torch.cholesky_solve(normed_Tr.T @ outputs_Tm, _gram_factor(normed_Tr)).T
    encode = torch.linalg.solve_triangular(moment.factor, parameter, upper=False, left=False) / moment.scale**0.5
    return FittedLatents(encode * (LATENT_RMS / rms_T1.mean()), decode_mr, loss, before)


def query_rows(query_QD: Tensor, read_Gpd: Tensor, scale: float) -> Tensor:
    """Return the queries' weight (H·(d + p), D): of each head its own d rows and the p that read the shared keys.

    `scale` compensates an attention scale that differs from the source's.
    """
    groups, _, head_dim = read_Gpd.shape
    heads_HdD = query_QD.double().view(-1, head_dim, query_QD.shape[1])
    read_Hpd = read_Gpd.repeat_interleave(len(heads_HdD) // groups, dim=0)
    return scale * torch.cat((heads_HdD, read_Hpd @ heads_HdD), dim=1).flatten(0, 1)


def head_rows(decode_mr: Tensor, heads: int, groups: int) -> Tensor:
    """Return the rows (H·2d, r) that decode a key and a value for each query head, from those of groups, (2C, r)."""
    key_Gdr, value_Gdr = (part.unflatten(0, (groups, -1)) for part in decode_mr.chunk(2))
    return torch.cat((key_Gdr, value_Gdr), dim=1).repeat_interleave(heads // groups, dim=0).flatten(0, 1)


def complex_rows(weight_CD: Tensor, pairs: int) -> Tensor:
    """Return (C, D) rows of heads as complex numbers (G, J, D): dimensions j and j + J of a head are one."""
    heads: Tensor = weight_CD.unflatten(0, (-1, 2 * pairs))
    return heads[:, :pairs] + 1j * heads[:, pairs:]


def complex_moment(moment_CC: Tensor, groups: int) -> Tensor:
    """Return E[κ κᴴ] (G·J, G·J) of the complex numbers of a real moment (C, C)."""
    pairs = len(moment_CC) // groups // 2
    half_NC = complex_rows(moment_CC, pairs).flatten(0, 1)
    return complex_rows(half_NC.mH, pairs).flatten(0, 1)


def _members(gain_JI: Tensor, lost_J: Tensor, frequencies_J: Tensor, turns_I: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each turn with the source's pairs (M) whose numbers it rotates, those of equal frequencies first.

    `gain_JI`: the share of a pair's energy that a turn saves of `lost_J`, the share that is lost without one.
    """
    offset_IJ = (turns_I.log()[:, None] - frequencies_J.log()).abs()
    next_I = offset_IJ.argmin(dim=1)
    joins_J = ~torch.isin(torch.arange(len(frequencies_J), device=next_I.device), next_I)
    joins_J &= gain_JI.amax(dim=1) >= ROTATED_GAIN * lost_J
    best_J = gain_JI.argmax(dim=1)
    for turn in offset_IJ.amin(dim=1).argsort(stable=True).tolist():
        chosen_J = joins_J & (best_J == turn)
        chosen_J[next_I[turn]] = bool(gain_JI[next_I[turn], turn] >= 0.0)
        if chosen_J.any():
            yield turn, chosen_J.nonzero().flatten()


def _mean_turn(shares_GW: Tensor, frequencies_J: Tensor) -> Tensor:
    """Return (G, J): the mean of e^{−iθw} over distances w."""
    distance_W = torch.arange(shares_GW.shape[1], dtype=torch.float64, device=shares_GW.device)
    angles_WJ = -distance_W[:, None] * frequencies_J
    return shares_GW.to(torch.complex128) @ torch.polar(torch.ones_like(angles_WJ), angles_WJ)


def _leading(metric_NN: Tensor, moment_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Return encode (N) and decode (N): decode · encode is the projection of rank 1 of least error in the metric."""
    values_N, vectors_NN = torch.linalg.eigh(metric_NN)
    values_N = values_N.clamp_min(CLIPPED * values_N[-1].clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    root_NN, inverse_NN = (vectors_NN * values_N) @ vectors_NN.mH, (vectors_NN / values_N) @ vectors_NN.mH
    leading_N = torch.linalg.eigh(root_NN @ moment_NN @ root_NN).eigenvectors[:, -1]
    leading_N = leading_N * (leading_N.abs().amax() / leading_N[leading_N.abs().argmax()])  # its phase is free
    leading_N = leading_N / torch.linalg.vector_norm(leading_N)
    return leading_N.conj() @ root_NN, inverse_NN @ leading_N


def _turn_loss(change_GJD: Tensor, moment_DD: Tensor, gradient_NN: Tensor) -> float:
    """Return ½ E[(γᵀ δ)²] of changes whose phases are spread: pairs of different frequencies add nothing together."""
    groups, pairs = change_GJD.shape[:2]
    gradient_GJGJ = gradient_NN.view(groups, pairs, groups, pairs)
    total = 0.0
    for pair in range(pairs):
        spread_GG = change_GJD[:, pair] @ moment_DD @ change_GJD[:, pair].mH
        total += 0.25 * float((gradient_GJGJ[:, pair, :, pair] * spread_GG.T).sum().real)
    return max(0.0, total)


def read_rows(read_GIJ: Tensor) -> Tensor:
    """Return (G, p, d): a query q reads Σ_j conj(read_ij) q_j, as rows (real, imaginary) for each i."""
    conjugate = read_GIJ.conj()
    real = torch.cat((conjugate.real, -conjugate.imag), dim=-1)
    imaginary = torch.cat((conjugate.imag, conjugate.real), dim=-1)
    return torch.stack((real, imaginary), dim=2).flatten(1, 2)


def _whitened(sample_TD: Tensor, moment: Factored) -> Tensor:
    """Return F⁻¹ x of each row, with C = F Fᵀ the moment."""
    whitened: Tensor = torch.linalg.solve_triangular(moment.factor, sample_TD.T, upper=False).T
    return whitened / moment.scale**0.5 if moment.scale else whitened


def _uncorrelated(rows_rD: Tensor) -> Tensor:
    """Return orthonormal rows of the same span, in the order of the given ones."""
    basis_Dr: Tensor = torch.linalg.qr(rows_rD.T).Q
    return basis_Dr.T.contiguous()


def _balance(squares_Tr: Tensor) -> Tensor:
    """Return weights (r,) above 0 of least E[(Σ w z² − 1)²], by multiplicative steps."""
    gram_rr, mean_r = squares_Tr.T @ squares_Tr / len(squares_Tr), squares_Tr.mean(dim=0)
    weights_r = torch.full_like(mean_r, 1.0 / len(mean_r))
    for _ in range(BALANCE_STEPS):
        weights_r = (weights_r * mean_r / (gram_rr @ weights_r)).clamp_min(1e-6)
    return weights_r


def _level(sample_TD: Tensor) -> Tensor | None:
    """Return scales (D) of the inputs of least E[(Σ s² x² − 1)²], or None if a square would be negative."""
    squares_TD = sample_TD.square()
    squares_TD = squares_TD / squares_TD.mean()
    weights_D = torch.linalg.lstsq(squares_TD, squares_TD.new_ones(len(squares_TD), 1)).solution[:, 0]
    return weights_D.sqrt() if bool((weights_D > 0.0).all()) else None


def _normed(latent_Tr: Tensor) -> tuple[Tensor, Tensor]:
    rms_T1 = latent_Tr.square().mean(dim=1, keepdim=True).sqrt()
    return latent_Tr / rms_T1, rms_T1


def _gram_factor(normed_Tr: Tensor) -> Tensor:
    gram_rr = normed_Tr.T @ normed_Tr
    gram_rr.diagonal().add_(RIDGE * len(normed_Tr))
    factor_rr: Tensor = torch.linalg.cholesky(gram_rr)
    return factor_rr


def _loss_and_slope(rows_rD: Tensor, white_TD: Tensor, weighted_Tm: Tensor) -> tuple[float, Tensor]:
    """Return ½ E[|Y x − B N(A x)|²] at the best B, and its gradient by A; outputs are weighted by their metric."""
    normed_Tr, rms_T1 = _normed(white_TD @ rows_rD.T)
    decode_rm = torch.cholesky_solve(normed_Tr.T @ weighted_Tm, _gram_factor(normed_Tr))
    error_Tm = weighted_Tm - normed_Tr @ decode_rm
    slope_Tr = error_Tm @ decode_rm.T
    across_T1 = (slope_Tr * normed_Tr).mean(dim=1, keepdim=True)
    slope_rD = ((slope_Tr - normed_Tr * across_T1) / rms_T1).T @ white_TD
    return 0.5 * float(error_Tm.square().sum()) / len(white_TD), -slope_rD / len(white_TD)
