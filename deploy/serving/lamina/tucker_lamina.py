# mypy: allow-untyped-calls
"""Projections as a shared-subspace Tucker decomposition, multiplied in its factors.

B batch, T tokens, D hidden, d head_dim, N MLP width, n heads of a projection, R1, R2, R3 Tucker ranks (as in the paper,
of the modes D, d or N, and role), p roles of a core.
"""

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization

from .block_lamina import ROWWISE_ROLES
from .factored_lamina import Derived, Factored, is_fleeting, matrix_of


def first_bits(num_bits: int, num_set: int) -> Tensor:
    """Return a bitmap (ceil(num_bits / 8),) uint8 with its first `num_set` bits set, least significant bit first."""
    bits = (torch.arange(-(-num_bits // 8) * 8) < num_set).view(-1, 8)
    return (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)


class SparseCore(Factored):
    """A sparse tensor: its non-zero `values` (nnz), and their positions as the bitmap `mask` uint8 (ceil(numel / 8)).

    Bit i of the flattened tensor is bit i % 8, least significant first, of byte i // 8. The mask is a buffer, which
    casts leave alone.
    """

    mask: Tensor

    def __init__(self, shape: tuple[int, ...], nnz: int) -> None:
        super().__init__()
        self.shape, self.nnz = torch.Size(shape), nnz
        self.values = nn.Parameter(torch.empty(nnz))
        self.register_buffer("mask", first_bits(self.shape.numel(), nnz))

    def initialise_(self, std: float) -> None:
        """Fill the values at random, and set the first `nnz` bits."""
        super().initialise_(std)
        initialization.copy_(self.mask, first_bits(self.mask.numel() * 8, self.nnz).to(self.mask.device))

    def forward(self) -> Tensor:
        """Return the dense tensor. Raises the ValueErrors of `check_stored`."""
        zeros = torch.zeros(self.shape.numel(), dtype=self.values.dtype, device=self.values.device)
        return zeros.masked_scatter(self.check_stored(), self.values).view(self.shape)

    def check_stored(self) -> Tensor:
        """Return the bitmap as a boolean for each number of the core. Raises ValueError unless it has nnz bits."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.mask.device)
        bits = (self.mask.unsqueeze(1) >> shifts & 1).flatten()[: self.shape.numel()].bool()
        if not torch.compiler.is_compiling() and not bits.is_meta and (num_set := int(bits.sum())) != self.nnz:
            raise ValueError(
                f"the core's bitmap has {num_set} bits, config.json says {self.nnz}: a damaged checkpoint?"
            )
        return bits


@dataclass(frozen=True)
class CoreShape:
    """One core of a Tucker group: (R1, R2, R3, n) in `core<suffix>`, a row of `third<suffix>` (p, R3) for each role.

    With `own_factors` it has a `first<suffix>` and `second<suffix>` of its own, one role, and no `third`.
    """

    suffix: str
    roles: tuple[str, ...]
    num_heads: int
    ranks: tuple[int, int, int]
    nnz: int | None  # None: stored dense
    own_factors: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(R1, R2, R3, n)."""
        return (*self.ranks, self.num_heads)


class TuckerLinears(Derived):
    """The projections of an attention or MLP as a shared-subspace Tucker decomposition, kept as factors.

    `first` (D, R1), `second` (d or N, R2), and per core `third` (p, R3) and `core` (LeSTD). With
    M[t, i] = sum over c of core[:, :, c, i] third[t, c], role t of head i is x first M[t, i] secondᵀ; a role that
    writes to the hidden states uses the transposes, summed over heads: o second M[t, i]ᵀ firstᵀ.

    In memory `first`, `second` and the cores that are stored dense are linears, of weights (R1, D), (d or N, R2) and
    (R2·R3·n, R1). The writing role needs M, and first and second transposed. These are computed at the first call and
    cached until the parameters change. They are computed in each call while parameters are trained, offloaded or have
    adapters, and in a compiled graph that began without them. With `csr`, cores that are stored sparse are used as CSR
    matrices in float32 or wider (CPUs multiply no others), if no gradient is needed.
    """

    first: nn.Module
    second: nn.Module

    def __init__(self, width: int, inner: int, cores: tuple[CoreShape, ...], csr: bool) -> None:
        super().__init__()
        self.cores, self.csr = cores, csr and all(core.nnz is not None for core in cores)
        self.inner = inner
        self.reads = [(role, core) for core in cores for role in core.roles if role not in ROWWISE_ROLES]
        self.width = width
        for core in cores:
            own = core.suffix if core.own_factors else ""
            if core is cores[0] or core.own_factors:
                self.add_factor(f"first{own}", (width, core.ranks[0]), reads_first=True)
                self.add_factor(f"second{own}", (inner, core.ranks[1]), reads_first=False)
            if not core.own_factors:
                third = nn.Parameter(torch.empty(len(core.roles), core.ranks[2]))
                self.register_parameter(f"third{core.suffix}", third)
            if core.nnz is None:
                self.add_factor(f"core{core.suffix}", core.shape, reads_first=True)
            else:
                self.add_module(f"core{core.suffix}", SparseCore(core.shape, core.nnz))

    def forward(self, x: Tensor, direction: str) -> dict[str, Tensor]:
        """Return outputs by role.

        Direction "in": of all roles that read the hidden states x (B, T, D). "out": of the role that writes to them,
        from x (B, T, n·d) or (B, T, N).
        """
        csr = self.csr and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        matrices = self._matrices(x, csr)
        return self._read(x, matrices) if direction == "in" else self._write(x, matrices, csr)

    def initialise_(self, std: float) -> None:
        """Draw factors with columns of about unit length, so that the projections' weights get at most `std`."""
        super().initialise_(std)
        for name, factor in self.factors.items():
            if not name.startswith("core"):
                initialization.normal_(getattr(self, name).weight, std=factor.shape[0] ** -0.5)

    def initial_std(self, name: str, std: float) -> float:
        """Return the standard deviation of `third`, the only parameter that is not a linear's."""
        rows: int = getattr(self, name).shape[0]
        return float(rows**-0.5)

    def _read(self, x_BTD: Tensor, matrices: dict[str, Any]) -> dict[str, Tensor]:
        y_BTa = self.first(x_BTD)
        outputs: dict[str, Tensor] = {}
        for core in dict.fromkeys(core for _, core in self.reads):
            z_BTbcn = self._through(core, y_BTa, matrices).unflatten(-1, core.shape[1:])
            roles = [role for role in core.roles if role not in ROWWISE_ROLES]  # the first ones
            third_pc = getattr(self, f"third{core.suffix}")[: len(roles)]
            out_BTpnd = self.second(torch.einsum("...bcn,pc->...pnb", z_BTbcn, third_pc))
            outputs |= {role: out_BTnd.flatten(-2) for role, out_BTnd in zip(roles, out_BTpnd.unbind(-3), strict=True)}
        return outputs

    def _through(self, core: CoreShape, y_BTa: Tensor, matrices: dict[str, Any]) -> Tensor:
        """Multiply the core by y (B, T, R1) → (B, T, R2·R3·n)."""
        if core.nnz is None:
            return cast(Tensor, getattr(self, f"core{core.suffix}")(y_BTa))
        matrix: Tensor = matrices[f"in{core.suffix}"]
        if matrix.layout == torch.strided:
            return y_BTa @ matrix
        z_XC: Tensor = (matrix @ y_BTa.flatten(0, -2).mT.to(matrix.dtype)).to(y_BTa.dtype).mT
        return cast(Tensor, z_XC.unflatten(0, y_BTa.shape[:-1]))

    def _write(self, x_BTC: Tensor, matrices: dict[str, Any], csr: bool) -> dict[str, Tensor]:
        role, core, _ = self._writer()
        s_BTnb = x_BTC.unflatten(-1, (core.num_heads, self.inner)) @ matrices["second"]
        y_BTa = self._write_csr(s_BTnb, matrices, role, core) if csr else s_BTnb.flatten(-2) @ matrices["out"]
        return {role: y_BTa @ matrices["first"]}

    def _writer(self) -> tuple[str, CoreShape, str]:
        """Return the writing role, its core, and the suffix of its factors."""
        role, core = next((role, core) for core in self.cores for role in core.roles if role in ROWWISE_ROLES)
        return role, core, core.suffix if core.own_factors else ""

    def _matrices(self, like: Tensor, csr: bool) -> dict[str, Any]:
        """Return the matrices of `_read` and `_write`, cached until the parameters change."""
        if torch.compiler.is_compiling():
            # A graph cannot check versions; casts, loading and train() have dropped outdated matrices.
            return (
                self._derived[1]
                if self._derived is not None and not self._derived[0][0]
                else self._compute(like, False)
            )
        parameters = [*self.parameters()]
        if is_fleeting(self) or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return self._compute(like, csr)
        tensors = [*parameters, *self.buffers()]
        key = (csr, *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))
        if self._derived is None or self._derived[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._derived = key, self._compute(like, csr)
        return cast(dict[str, Any], self._derived[1])

    def _core(self, core: CoreShape, like: Tensor) -> Tensor:
        """Return the dense tensor (R1, R2, R3, n)."""
        stored = getattr(self, f"core{core.suffix}")
        if core.nnz is not None:
            return cast(Tensor, stored())
        return cast(Tensor, matrix_of(stored, core.ranks[0], like).mT.unflatten(-1, core.shape[1:]))

    def _compute(self, like: Tensor, csr: bool) -> dict[str, Any]:
        """Compute `first` (R1, D) and `second` (d or N, R2) of the writing role, and matrices of cores.

        "in" with the core's suffix (R1, R2·R3·n), for roles that read a core stored sparse; "out" (n·R2, R1), M of the
        writing role. As CSR matrices, "in" is transposed, and "out" is the core (R1, R2·R3·n) of the role.
        """
        role, writer, own = self._writer()
        matrices: dict[str, Any] = {
            "first": matrix_of(getattr(self, f"first{own}"), self.width, like),
            "second": matrix_of(getattr(self, f"second{own}"), writer.ranks[1], like),
        }
        for core in dict.fromkeys(core for _, core in self.reads if core.nnz is not None):
            matrix = self._core(core, like).flatten(1)
            matrices[f"in{core.suffix}"] = _as_csr(matrix.mT) if csr else matrix
        core_abcn = self._core(writer, like)
        if csr:
            return {**matrices, "out": _as_csr(core_abcn.flatten(1))}
        third_c = core_abcn.new_ones(1) if writer.own_factors else self._third(role, writer)
        return {**matrices, "out": torch.einsum("abcn,c->nba", core_abcn, third_c).flatten(0, 1)}

    def _third(self, role: str, core: CoreShape) -> Tensor:
        return cast(Tensor, getattr(self, f"third{core.suffix}")[core.roles.index(role)])

    def _write_csr(self, s_BTnb: Tensor, matrices: dict[str, Any], role: str, core: CoreShape) -> Tensor:
        matrix: Tensor = matrices["out"]
        s_Xnb = s_BTnb.flatten(0, -3)
        third_c = s_Xnb.new_ones(1)
        if not core.own_factors:
            third_c = self._third(role, core)
        u_XC = torch.einsum("xnb,c->xbcn", s_Xnb, third_c).flatten(1)
        y_BTa: Tensor = (matrix @ u_XC.mT.to(matrix.dtype)).mT.to(s_BTnb.dtype).unflatten(0, s_BTnb.shape[:-2])
        return y_BTa


def _as_csr(matrix: Tensor) -> Tensor:
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return wide.contiguous().to_sparse_csr()
