"""Tucker decomposition with shared subspaces, and its sparse core (docs/methods.md#lestd; eq. 3 to 6 of LeSTD).

A problem is a list of tensors (D, d, t, h) that share U₁ (D, R₁) and U₂ (d, R₂); each has its own U₃ (t, R₃) and core
(R₁, R₂, R₃, h); the last mode (heads) is not factored. MHA: one tensor, t = 4, h = H. GQA: [q, o] with h = H and [k, v]
with h = G. FFN: one tensor, d = N, t = p, h = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank
from pipeline.kernels.selection import nth_largest
from pipeline.kernels.spectra import eigh_descending, fix_signs

_POLAR_RATIO = 1e-8


@dataclass(frozen=True)
class Tucker:
    """W_i ≈ core_i ×₁ U₁ ×₂ U₂ ×₃ U₃ᵢ, all float64, the factors' columns orthonormal.

    U₁ = `first` (D, R₁), U₂ = `second` (d, R₂), U₃ = `thirds` (t, R₃), `cores` (R₁, R₂, R₃, h). `total` is Σ‖W_i‖²,
    `energies` are Σ‖core_i‖² after each sweep; the squared error is total − energy (exact to about 1e-15 of the total).
    """

    first: Tensor
    second: Tensor
    thirds: tuple[Tensor, ...]
    cores: tuple[Tensor, ...]
    energies: tuple[float, ...]
    total: float

    @property
    def error(self) -> float:
        """Squared error: total − Σ‖core_i‖², for dense and for thresholded cores; not below 0."""
        return max(0.0, self.total - sum(float(core.square().sum()) for core in self.cores))


def stack_attention(
    query_FD: Tensor, key_FD: Tensor, value_FD: Tensor, output_DF: Tensor, heads: int, groups: int
) -> list[Tensor]:
    """Stack weights (out, in) of q, k, v, o as tensors to decompose: MHA (D, d, 4, H); GQA (D, d, 2, H), (D, d, 2, G).

    Order along the third mode: q, k, v, o; or q, o and k, v. Raises ValueError on shapes that do not fit the heads.
    """
    shapes = [tuple(weight.shape) for weight in (query_FD, key_FD, value_FD, output_DF)]
    hidden = query_FD.shape[-1]
    width = query_FD.shape[0] // heads if heads > 0 else 0
    expected = [(heads * width, hidden), (groups * width, hidden), (groups * width, hidden), (hidden, heads * width)]
    if shapes != expected or width == 0 or groups < 1 or heads % groups:
        raise ValueError(f"weights of shapes {shapes} do not fit {heads} query heads and {groups} key/value heads")
    query, key, value = (_by_head(weight.T, width) for weight in (query_FD, key_FD, value_FD))
    output = _by_head(output_DF, width)
    if heads == groups:
        return [torch.stack((query, key, value, output), dim=2)]
    return [torch.stack((query, output), dim=2), torch.stack((key, value), dim=2)]


def stack_mlp(projections: Sequence[Tensor], down_DN: Tensor) -> list[Tensor]:
    """Stack weights (N, D) of up (or gate, up) and down (D, N) as a tensor (D, N, p, 1), down last (appendix I).

    Raises ValueError on shapes that do not fit.
    """
    shapes = [tuple(weight.shape) for weight in projections]
    if down_DN.ndim != 2 or any(shape != tuple(down_DN.T.shape) for shape in shapes):
        raise ValueError(f"projections {shapes} and down {tuple(down_DN.shape)} do not fit")
    parts = [weight.detach().T for weight in projections] + [down_DN.detach()]
    return [torch.stack(parts, dim=2).to(torch.float64)[..., None]]


def shared_tucker(
    tensors: Sequence[Tensor], ranks: tuple[int, int, int], sweeps: int = 10, tolerance: float = 1e-6
) -> Tucker:
    """Stage I: HOOI from the HOSVD, on Gram matrices of the short sides (eq. 3 and 4). float64.

    R₃ is limited to a tensor's t. It stops when a sweep changes the energy by no more than `tolerance` x total, or
    after `sweeps`. The energy never falls between sweeps. Raises ValueError on tensors that do not share D and d, on
    NaN or infinity, and on ranks outside 1..D, 1..d, 1..max t.
    """
    tensors = _checked(tensors, ranks, sweeps)
    total = sum(float(tensor.square().sum()) for tensor in tensors)
    caps = [min(ranks[2], tensor.shape[2]) for tensor in tensors]
    first = _leading([_unfold(tensor, 0) for tensor in tensors], ranks[0])[0]
    second = _leading([_unfold(tensor, 1) for tensor in tensors], ranks[1])[0]
    thirds = [_leading([_unfold(tensor, 2)], cap)[0] for tensor, cap in zip(tensors, caps, strict=True)]
    energies: list[float] = []
    for _ in range(sweeps):
        inner = [_narrow(_narrow(tensor, third, 2), second, 1) for tensor, third in zip(tensors, thirds, strict=True)]
        first = _leading([_unfold(tensor, 0) for tensor in inner], ranks[0])[0]
        inner = [_narrow(_narrow(tensor, first, 0), third, 2) for tensor, third in zip(tensors, thirds, strict=True)]
        second = _leading([_unfold(tensor, 1) for tensor in inner], ranks[1])[0]
        inner = [_narrow(_narrow(tensor, first, 0), second, 1) for tensor in tensors]
        leading = [_leading([_unfold(tensor, 2)], cap) for tensor, cap in zip(inner, caps, strict=True)]
        thirds = [vectors for vectors, _ in leading]
        energies.append(sum(energy for _, energy in leading))
        if len(energies) > 1 and energies[-1] - energies[-2] <= tolerance * total:
            break
    cores = tuple(_core(tensor, first, second, third) for tensor, third in zip(tensors, thirds, strict=True))
    return Tucker(first, second, tuple(thirds), cores, tuple(energies), total)


def threshold_cores(cores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Stage II: copy the cores (of one layer or several) and zero all but the `count` largest |g| among them.

    Exact, as the basis is orthonormal: dropping g costs g². Of equal ones the first are kept. Raises ValueError
    unless 1 <= count <= the number of entries, and on NaN or infinity.
    """
    for core in cores:
        require_finite("core", core)
    flat = torch.cat([core.detach().reshape(-1).abs() for core in cores])
    require_rank("count", count, flat.numel())
    bound = nth_largest(flat, count)
    keep, equal = flat > bound, flat == bound
    keep |= equal & (equal.cumsum(0) <= count - keep.sum())
    parts = torch.split(keep, [core.numel() for core in cores])
    return [core.detach() * part.view(core.shape) for core, part in zip(cores, parts, strict=True)]


def refine_sparse(
    tensors: Sequence[Tensor], tucker: Tucker, count: int, sweeps: int, tolerance: float = 1e-6
) -> Tucker:
    """Stage II, beyond the paper: threshold, turn U₁ and U₂ to fit the sparse cores (orthogonal Procrustes), again.

    Return the decomposition with `count` core entries left. Its `energies` are those of the sparse cores, the first
    before any turn. The error never rises: each turn is optimal for its cores, and each threshold for its factors.
    Stops when a sweep gains no more than `tolerance` x total, or after `sweeps` (0: threshold only). Raises ValueError
    as `threshold_cores` and `shared_tucker`.
    """
    ranks = (tucker.first.shape[1], tucker.second.shape[1], max(third.shape[1] for third in tucker.thirds))
    tensors = _checked(tensors, ranks, 1)
    best = replace(tucker, cores=tuple(threshold_cores(tucker.cores, count)))
    best = replace(best, energies=(best.total - best.error,))
    for _ in range(sweeps):
        turned = _turned(tensors, best, count)
        gain = best.error - turned.error
        if gain > 0.0:
            best = replace(turned, energies=(*best.energies, best.total - turned.error))
        if gain <= tolerance * best.total:
            break
    return best


def rebuild(tucker: Tucker) -> list[Tensor]:
    """Rebuild the tensors (D, d, t, h)."""
    full = []
    for core, third in zip(tucker.cores, tucker.thirds, strict=True):
        full.append(_widen(_widen(_widen(core, third, 2), tucker.second, 1), tucker.first, 0))
    return full


def _turned(tensors: Sequence[Tensor], tucker: Tucker, count: int) -> Tucker:
    """Update U₁, then U₂, for fixed sparse cores, and select the best `count` entries in the new basis."""
    narrow = [_project(tensor, third, 2) for tensor, third in zip(tensors, tucker.thirds, strict=True)]
    pull = [
        _unfold(tensor, 0) @ _unfold(_widen(core, tucker.second, 1), 0).T
        for tensor, core in zip(narrow, tucker.cores, strict=True)
    ]
    first = _polar(sum(pull[1:], pull[0]))
    narrow = [_project(tensor, first, 0) for tensor in narrow]
    pull = [_unfold(tensor, 1) @ _unfold(core, 1).T for tensor, core in zip(narrow, tucker.cores, strict=True)]
    second = _polar(sum(pull[1:], pull[0]))
    cores = threshold_cores([_project(tensor, second, 1) for tensor in narrow], count)
    return replace(tucker, first=first, second=second, cores=tuple(cores))


def _polar(matrix: Tensor) -> Tensor:
    """The U of orthonormal columns nearest to `matrix`, which maximises tr(Uᵀ matrix): orthogonal Procrustes."""
    scale = float(matrix.abs().max()) or 1.0
    matrix = matrix / scale
    values, vectors = eigh_descending(matrix.T @ matrix)
    if float(values[-1]) <= _POLAR_RATIO * float(values[0]):
        left_vectors, _, right_vectors = torch.linalg.svd(matrix, full_matrices=False)
        return torch.mm(left_vectors, right_vectors)
    polar = matrix @ ((vectors / values.sqrt()) @ vectors.T)
    # One Newton-Schulz step: the squared condition number left an error of up to 1e-8 in the orthonormality.
    return 1.5 * polar - 0.5 * polar @ (polar.T @ polar)


def _leading(unfoldings: Sequence[Tensor], rank: int) -> tuple[Tensor, float]:
    """Leading left singular vectors of the unfoldings side by side, and the energy they capture."""
    rows, columns = unfoldings[0].shape[0], sum(unfolding.shape[1] for unfolding in unfoldings)
    if rank <= columns < rows:
        joint = torch.cat(list(unfoldings), dim=1)
        values, vectors = eigh_descending(joint.T @ joint)
        return fix_signs(torch.linalg.qr(joint @ vectors[:, :rank]).Q), float(values[:rank].sum())
    gram = torch.zeros(rows, rows, dtype=torch.float64, device=unfoldings[0].device)
    for unfolding in unfoldings:
        gram.addmm_(unfolding, unfolding.T)
    values, vectors = eigh_descending(gram)
    return vectors[:, :rank].contiguous(), float(values[:rank].sum())


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)


def _project(tensor: Tensor, factor: Tensor, mode: int) -> Tensor:
    """tensor ×_mode factorᵀ."""
    product: Tensor = torch.tensordot(tensor, factor, dims=([mode], [0]))
    return product.movedim(-1, mode)


def _widen(tensor: Tensor, factor: Tensor, mode: int) -> Tensor:
    """tensor ×_mode factor."""
    product: Tensor = torch.tensordot(tensor, factor, dims=([mode], [1]))
    return product.movedim(-1, mode)


def _narrow(tensor: Tensor, factor: Tensor, mode: int) -> Tensor:
    """`_project`, skipped for a square factor: that only rotates the mode, which other modes' Gram matrices ignore."""
    return tensor if factor.shape[0] == factor.shape[1] else _project(tensor, factor, mode)


def _core(tensor: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return _project(_project(_project(tensor, third, 2), first, 0), second, 1).contiguous()


def _by_head(matrix_DF: Tensor, width: int) -> Tensor:
    """(D, heads · d) -> (D, d, heads)."""
    return matrix_DF.detach().to(torch.float64).reshape(matrix_DF.shape[0], -1, width).transpose(1, 2)


def _checked(tensors: Sequence[Tensor], ranks: tuple[int, int, int], sweeps: int) -> list[Tensor]:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not shapes or any(len(shape) != 4 or shape[:2] != shapes[0][:2] or 0 in shape for shape in shapes):
        raise ValueError(f"tensors (D, d, t, h) that share D and d are needed, not {shapes}")
    for tensor in tensors:
        require_finite("tensor", tensor)
    limits = (shapes[0][0], shapes[0][1], max(shape[2] for shape in shapes))
    for number, (rank, limit) in enumerate(zip(ranks, limits, strict=True), start=1):
        require_rank(f"R{number}", rank, limit)
    if sweeps < 1:
        raise ValueError(f"at least one sweep is needed, not {sweeps}")
    return [tensor.detach().to(torch.float64) for tensor in tensors]
