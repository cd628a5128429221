"""Rotated key dimensions fitted to the rotations of all pairs together. docs/methods.md#mla.

Legend: D hidden, G key/value heads, J pairs of a head, N = G·J complex numbers of a key, I = p/2 turns, the frequencies
of the rotated dimensions that all heads share, W distances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.latent import SplitKeys, complex_moment, complex_rows, read_rows

FIT_STEPS, HISTORY = 60, 20  # of L-BFGS
RIDGE = 1e-9  # of the mean diagonal of the turns' moment
CLIPPED = 1e-8  # of the largest eigenvalue of the keys' moment
EXACT = 1e-9  # of the loss without rotation: a start that loses less stays


class TurnProblem(NamedTuple):
    """The numbers κ (N) of a key and what their rotations weigh, in complex float64.

    Attributes:
        moment: (N, N), E[κ κᴴ]. `weights`: (G, J), the mean square of the gradient at each number.
        means: (G, J + I), the mean of e^{−iθw} over distances, of pairs and of turns.
        spread: (G, J + I, J + I), E[e^{−iθw} e^{iθ'w}] less the product of the means.
    """

    moment: Tensor
    weights: Tensor
    means: Tensor
    spread: Tensor

    @property
    def whole(self) -> float:
        """Return the loss without any rotation, in nats per token."""
        pairs = self.weights.shape[1]
        energy_GJ = self.moment.diagonal().real.view(-1, pairs)
        own_GJ = self.spread.diagonal(dim1=1, dim2=2).real[:, :pairs]
        return 0.25 * float((self.weights * energy_GJ * own_GJ).sum())


def fit_turns(
    start: SplitKeys,
    key_CD: Tensor,
    moment_DD: Tensor,
    gradient_CC: Tensor,
    frequencies_J: Tensor,
    turns_I: Tensor,
    shares_GW: Tensor,
    steps: int = FIT_STEPS,
) -> SplitKeys:
    """Fit the numbers that the turns rotate, from those of `start`, and how queries read them.

    A key at distance w, e^{−iθw} κ, becomes R e^{−iφw} E κ + B κ. Minimises ¼ Σ_w share_w E[|Γ^{1/2} error|²] over E by
    `steps` of L-BFGS, with Γ diagonal: pairs of different frequency add nothing together, and neither do heads. The
    best R and B for each E are least squares. Means per token. Returns `start` where it is exact.
    """
    problem = turn_problem(key_CD, moment_DD, gradient_CC, frequencies_J, turns_I, shares_GW)
    if start.loss <= EXACT * problem.whole:
        return start
    pairs, groups = len(frequencies_J), len(shares_GW)
    keys_ND = complex_rows(key_CD.double(), pairs).flatten(0, 1)
    values_N, vectors_NN = torch.linalg.eigh(problem.moment)
    root_N = values_N.clamp_min(CLIPPED * values_N[-1]).sqrt()
    unroot_NN = (vectors_NN / root_N) @ vectors_NN.mH
    parameter_IN = _start(start, keys_ND, moment_DD, vectors_NN, unroot_NN)
    _descend_(parameter_IN, unroot_NN, problem, steps)
    encode_IN = parameter_IN @ unroot_NN
    read_GJI, loss, _ = read_and_slope(encode_IN, problem)
    mean_GJ, mean_GI = problem.means.split((pairs, len(turns_I)), dim=1)
    mixed_NN = torch.diag(mean_GJ.flatten()) - (read_GJI * mean_GI[:, None]).flatten(0, 1) @ encode_IN
    shared_ID = encode_IN @ keys_ND
    rest_GJD = (mixed_NN @ keys_ND).view(groups, pairs, -1)
    return SplitKeys(
        torch.stack((shared_ID.real, shared_ID.imag), dim=1).flatten(0, 1),
        read_rows(read_GJI.transpose(1, 2)),
        torch.cat((rest_GJD.real, rest_GJD.imag), dim=1).flatten(0, 1),
        loss,
    )


def turn_problem(
    key_CD: Tensor, moment_DD: Tensor, gradient_CC: Tensor, frequencies_J: Tensor, turns_I: Tensor, shares_GW: Tensor
) -> TurnProblem:
    """Return the moments of a key's complex numbers and of the rotations over distances."""
    pairs, groups = len(frequencies_J), len(shares_GW)
    keys_ND = complex_rows(key_CD.double(), pairs).flatten(0, 1)
    weights_N = complex_moment(gradient_CC.double(), groups).diagonal().real.clamp_min(0.0)
    distance_W = torch.arange(shares_GW.shape[1], dtype=torch.float64, device=key_CD.device)
    angles_WA = -distance_W[:, None] * torch.cat((frequencies_J, turns_I)).double()
    turn_WA = torch.polar(torch.ones_like(angles_WA), angles_WA)
    shares = shares_GW.to(turn_WA.dtype)
    means_GA = shares @ turn_WA
    products_GAA = torch.stack([(turn_WA * share_W[:, None]).T @ turn_WA.conj() for share_W in shares])
    return TurnProblem(
        keys_ND @ moment_DD.to(turn_WA.dtype) @ keys_ND.mH,
        weights_N.view(groups, pairs),
        means_GA,
        products_GAA - means_GA[:, :, None] * means_GA[:, None].conj(),
    )


def read_and_slope(encode_IN: Tensor, problem: TurnProblem) -> tuple[Tensor, float, Tensor]:
    """Return the best R (G, J, I) for E (I, N), the loss in nats per token, and its gradient by E.

    R_g = V_g M_g⁻¹ with V = (K Eᴴ) ∘ S_θφ and M = (E K Eᴴ) ∘ S_φφ; the loss is the whole less ¼ tr(Γ V M⁻¹ Vᴴ).
    """
    groups, pairs = problem.weights.shape
    crossed_GJI, turned_GII = problem.spread[:, :pairs, pairs:], problem.spread[:, pairs:, pairs:]
    read_IN = encode_IN @ problem.moment
    target_GJI = read_IN.mH.reshape(groups, pairs, -1) * crossed_GJI
    gram_GII = (read_IN @ encode_IN.mH) * turned_GII
    mean_G = gram_GII.diagonal(dim1=1, dim2=2).real.mean(dim=1)
    gram_GII.diagonal(dim1=1, dim2=2).add_((RIDGE * mean_G)[:, None])
    read_GJI = torch.cholesky_solve(target_GJI.mH, torch.linalg.cholesky(gram_GII)).mH
    weighted_GJI = problem.weights[..., None] * read_GJI
    loss = problem.whole - 0.25 * float((weighted_GJI.conj() * target_GJI).sum().real)
    feels_II = ((read_GJI.mH @ weighted_GJI) * turned_GII.mT).sum(dim=0)
    pulls_NI = (weighted_GJI.conj() * crossed_GJI).flatten(0, 1)
    slope_IN = 0.5 * (feels_II @ read_IN - pulls_NI.mT @ problem.moment)
    return read_GJI, max(0.0, loss), slope_IN


def _start(start: SplitKeys, keys_ND: Tensor, moment_DD: Tensor, vectors_NN: Tensor, unroot_NN: Tensor) -> Tensor:
    """Return the turns' numbers of a split by whitened keys (I, N), of mean square 1.

    A turn without a number begins with one of the keys' leading directions.
    """
    shared_ID = torch.complex(start.shared[::2], start.shared[1::2])
    parameter_IN: Tensor = shared_ID @ moment_DD.to(shared_ID.dtype) @ keys_ND.mH @ unroot_NN
    size_I = torch.linalg.vector_norm(parameter_IN, dim=1)
    idle_I = size_I <= 1e-6 * size_I.max()
    leading_NN = vectors_NN.mH.flip(0)
    parameter_IN[idle_I] = leading_NN[torch.arange(int(idle_I.sum()), device=idle_I.device) % len(leading_NN)]
    size_I1: Tensor = torch.linalg.vector_norm(parameter_IN, dim=1, keepdim=True)
    return parameter_IN / size_I1


def _descend_(parameter_IN: Tensor, unroot_NN: Tensor, problem: TurnProblem, steps: int) -> None:
    """Lower the loss over E = P · unroot in place, by L-BFGS."""
    if steps == 0:
        return
    real_IN2 = torch.view_as_real(parameter_IN)
    optimizer = torch.optim.LBFGS(
        [real_IN2], max_iter=steps, history_size=HISTORY, line_search_fn="strong_wolfe", tolerance_grad=1e-12,
        tolerance_change=1e-12,
    )  # fmt: skip
    whole = problem.whole

    def closure() -> Tensor:
        _, loss, slope_IN = read_and_slope(torch.view_as_complex(real_IN2) @ unroot_NN, problem)
        real_IN2.grad = torch.view_as_real((slope_IN @ unroot_NN).contiguous()) / whole
        return real_IN2.new_tensor(loss / whole)

    optimizer.step(closure)
