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
from .factored_lamina import Derived, Factored, is_offloaded


def first_bits(num_bits: int, num_set: int) -> Tensor:
    """A bitmap (ceil(num_bits / 8),) uint8 with its first `num_set` bits set, least significant bit first."""
    bits = (torch.arange(-(-num_bits // 8) * 8) < num_set).view(-1, 8)
    return (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)


class SparseCore(Factored):
    """A tensor as its non-zeros and where they are: `values` (nnz), and the bitmap `mask` uint8 (ceil(numel / 8)).

    Bit i of the flattened tensor is bit i % 8, least significant first, of byte i // 8. A buffer: no cast touches it.
    """

    mask: Tensor

    def __init__(self, shape: tuple[int, ...], nnz: int) -> None:
        super().__init__()
        self.shape, self.nnz = torch.Size(shape), nnz
        self.values = nn.Parameter(torch.empty(nnz))
        self.register_buffer("mask", first_bits(self.shape.numel(), nnz))

    def initialise_(self, std: float) -> None:
        """Fills the values at random, and sets the first `nnz` bits."""
        super().initialise_(std)
        initialization.copy_(self.mask, first_bits(self.mask.numel() * 8, self.nnz).to(self.mask.device))

    def forward(self) -> Tensor:
        """The dense tensor. Raises ValueError when the bitmap does not have nnz bits."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.mask.device)
        bits = (self.mask.unsqueeze(1) >> shifts & 1).flatten()[: self.shape.numel()].bool()
        if not torch.compiler.is_compiling() and not bits.is_meta and (found := int(bits.sum())) != self.nnz:
            raise ValueError(f"the core's bitmap has {found} bits, config.json says {self.nnz}: a damaged checkpoint?")
        zeros = torch.zeros(self.shape.numel(), dtype=self.values.dtype, device=self.values.device)
        return zeros.masked_scatter(bits, self.values).view(self.shape)


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
    """The projections of an attention or MLP as a shared-subspace Tucker decomposition, never multiplied out.

    `first` (D, R1), `second` (d or N, R2), and per core `third` (p, R3) and `core` (LeSTD). With
    M[t, i] = sum over c of core[:, :, c, i] third[t, c], role t of head i is x first M[t, i] secondᵀ; a role that
    writes to the hidden states goes backwards, summed over heads: o second M[t, i]ᵀ firstᵀ.

    M is made at the first call and kept until the parameters change; while they are trained, are offloaded, or in a
    compiled graph that began without M, it is made in each call. With `csr`, cores that are stored sparse are used as
    they are instead of M, as CSR matrices in float32 or wider (CPUs multiply no others), where there is no gradient.
    """

    first: Tensor
    second: Tensor

    def __init__(self, width: int, inner: int, cores: tuple[CoreShape, ...], csr: bool) -> None:
        super().__init__()
        self.cores, self.csr = cores, csr and all(core.nnz is not None for core in cores)
        self.inner = inner
        self.reads = [(role, core) for core in cores for role in core.roles if role not in ROWWISE_ROLES]
        for core in cores:
            own = core.suffix if core.own_factors else ""
            if core is cores[0] or core.own_factors:
                self.register_parameter(f"first{own}", nn.Parameter(torch.empty(width, core.ranks[0])))
                self.register_parameter(f"second{own}", nn.Parameter(torch.empty(inner, core.ranks[1])))
            if not core.own_factors:
                third = nn.Parameter(torch.empty(len(core.roles), core.ranks[2]))
                self.register_parameter(f"third{core.suffix}", third)
            if core.nnz is None:
                self.register_parameter(f"core{core.suffix}", nn.Parameter(torch.empty(core.shape)))
            else:
                self.add_module(f"core{core.suffix}", SparseCore(core.shape, core.nnz))

    def forward(self, x: Tensor, direction: str) -> dict[str, Tensor]:
        """The outputs by role. "in": of all roles that read the hidden states x (B, T, D); "out": of the one that
        writes to them, from x (B, T, n·d) or (B, T, N)."""
        csr = self.csr and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        made = self._matrices(csr)
        return self._read(x, made, csr) if direction == "in" else self._write(x, made, csr)

    def initial_std(self, name: str, std: float) -> float:
        """Factors with columns of about unit length, so that the projections' weights get at most `std`."""
        rows: int = getattr(self, name).shape[0]
        return std if name.startswith("core") else float(rows**-0.5)

    def _read(self, x_BTD: Tensor, made: dict[str, Any], csr: bool) -> dict[str, Tensor]:
        y_BTa = x_BTD @ self.first
        z_BTC = self._read_csr(y_BTa, made) if csr else y_BTa @ made["in"]
        out_BTnd = z_BTC.unflatten(-1, (-1, self.second.shape[1])) @ self.second.mT
        heads = [core.num_heads for _, core in self.reads]
        return {role: o.flatten(-2) for (role, _), o in zip(self.reads, out_BTnd.split(heads, -2), strict=True)}

    def _write(self, x_BTC: Tensor, made: dict[str, Any], csr: bool) -> dict[str, Tensor]:
        role, core, own = self._writer()
        s_BTnb = x_BTC.unflatten(-1, (core.num_heads, self.inner)) @ getattr(self, f"second{own}")
        y_BTa = self._write_csr(s_BTnb, made, role, core) if csr else s_BTnb.flatten(-2) @ made["out"]
        first_Da: Tensor = getattr(self, f"first{own}")
        return {role: y_BTa @ first_Da.mT}

    def _writer(self) -> tuple[str, CoreShape, str]:
        """The role that writes, its core, and the suffix of its factors."""
        role, core = next((role, core) for core in self.cores for role in core.roles if role in ROWWISE_ROLES)
        return role, core, core.suffix if core.own_factors else ""

    def _matrices(self, csr: bool) -> dict[str, Any]:
        """What `_read` and `_write` multiply with, made anew when the parameters are not those of the last time."""
        if torch.compiler.is_compiling():
            # A graph can check no versions; casts, loading and train() have dropped what no longer holds.
            return self._made[1] if self._made is not None and not self._made[0][0] else self._make_dense()
        parameters = [*self.parameters()]
        if is_offloaded(self) or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return self._make_csr() if csr else self._make_dense()
        tensors = [*parameters, *self.buffers()]
        key = (csr, *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))
        if self._made is None or self._made[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._made = key, self._make_csr() if csr else self._make_dense()
        return cast(dict[str, Any], self._made[1])

    def _core(self, core: CoreShape) -> Tensor:
        stored = getattr(self, f"core{core.suffix}")
        return cast(Tensor, stored() if isinstance(stored, nn.Module) else stored)

    def _make_dense(self) -> dict[str, Any]:
        """M of the reading roles side by side, "in" (R1, sum of n·R2), and of the writing one, "out" (n·R2, R1)."""
        made: dict[str, Tensor] = {}
        for core in self.cores:
            core_abcn = self._core(core)
            if core.own_factors:
                m_panb = core_abcn.permute(2, 0, 3, 1)
            else:
                m_panb = torch.einsum("abcn,pc->panb", core_abcn, getattr(self, f"third{core.suffix}"))
            made.update(zip(core.roles, m_panb, strict=True))
        writer = self._writer()[0]
        return {
            "in": torch.cat([made[role].flatten(1) for role, _ in self.reads], dim=1),
            "out": made[writer].permute(1, 2, 0).flatten(0, 1),
        }

    def _make_csr(self) -> dict[str, Any]:
        """Each core as a matrix (R1, R2·R3·n), "out", and transposed, "in"; only those that a role needs."""
        made = {}
        writer = self._writer()[1]
        for core in self.cores:
            matrix = self._core(core).flatten(1)
            wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
                if any(c is core for _, c in self.reads):
                    made[f"in{core.suffix}"] = wide.mT.contiguous().to_sparse_csr()
                if core is writer:
                    made[f"out{core.suffix}"] = wide.to_sparse_csr()
        return made

    def _read_csr(self, y_BTa: Tensor, made: dict[str, Any]) -> Tensor:
        y_aX = y_BTa.flatten(0, -2).mT
        parts = []
        for core in dict.fromkeys(core for _, core in self.reads):
            matrix = made[f"in{core.suffix}"]
            z_Xbcn = (matrix @ y_aX.to(matrix.dtype)).to(y_aX.dtype).mT.unflatten(-1, core.shape[1:])
            rows = [i for i, role in enumerate(core.roles) if role not in ROWWISE_ROLES]
            third_pc = getattr(self, f"third{core.suffix}")[rows]
            parts.append(torch.einsum("xbcn,pc->xpnb", z_Xbcn, third_pc).flatten(1))
        z_BTC: Tensor = torch.cat(parts, dim=1).unflatten(0, y_BTa.shape[:-1])
        return z_BTC

    def _write_csr(self, s_BTnb: Tensor, made: dict[str, Any], role: str, core: CoreShape) -> Tensor:
        matrix: Tensor = made[f"out{core.suffix}"]
        s_Xnb = s_BTnb.flatten(0, -3)
        third_c = s_Xnb.new_ones(1)
        if not core.own_factors:
            third_c = getattr(self, f"third{core.suffix}")[core.roles.index(role)]
        u_XC = torch.einsum("xnb,c->xbcn", s_Xnb, third_c).flatten(1)
        y_BTa: Tensor = (matrix @ u_XC.mT.to(matrix.dtype)).mT.to(s_BTnb.dtype).unflatten(0, s_BTnb.shape[:-2])
        return y_BTa
