# mypy: allow-untyped-calls
"""Weights in the formats of other tools: fp8, int8 and int4 codes with scales, as a model's source stores them.

A weight (O, I) is (code - zero) · scale. A grid (R, C) of scales covers the weight in blocks of rows and columns; the
last block of an axis may be smaller. `StoredFormat.kind` names the tensors that hold codes, scales and zeros:

| kind | tensors of PATH | codes |
|---|---|---|
| fp8 | weight, weight_scale_inv | fp8 numbers |
| float | weight, weight_scale | fp8 numbers, by compressed-tensors |
| int | weight, weight_scale, weight_zero_point | int8 |
| packed | weight_packed, weight_scale, weight_shape, weight_zero_point | packed along a row's columns |
| gptq | qweight, qzeros, scales, g_idx | packed along the columns of a row; g_idx has the group of each column |
| awq | qweight, qzeros, scales | eight rows in a word, even ones first |
| mxfp4 | PATH_blocks, PATH_scales | two e2m1 numbers in a byte, with a power of two for every 32 |

O outputs (rows), I inputs (columns), R rows and C columns of the grid, E experts, G groups.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[tuple[int, ...], str]]  # part -> shape and dtype
WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of four-bit codes of each of eight rows
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
FIELD = "stored_formats"  # of config.json


@dataclass(frozen=True)
class StoredFormat:
    """How the tensors of a weight hold it.

    Attributes:
        kind: see above.
        dtype: of the decoded weight.
        codes: dtype of the tensor of codes.
        scales: dtype of the scales.
        bits: of a code.
        block: rows and columns that share a scale; 0: all.
        dims: number of dimensions of the tensor of scales.
        zeros: the dtype of zeros; "": none.
        offset: what is added to stored zeros.
        ordered: columns belong to groups in any order (`g_idx`).
    """

    kind: str
    dtype: str
    codes: str
    scales: str
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    dims: int = 2
    zeros: str = ""
    offset: int = 0
    ordered: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**asdict(self), "block": list(self.block)}

    def grid(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape (R, C) of the grid of scales."""
        rows, columns = self.block
        return math.ceil(outputs / rows) if rows else 1, math.ceil(inputs / columns) if columns else 1

    def parts(self, outputs: int, inputs: int) -> Shapes:
        """Return the stored tensors of a weight (O, I)."""
        grid, words = self.grid(outputs, inputs), WORD_BITS // self.bits
        shape = grid if self.dims == 2 else grid[:1] if self.dims else ()
        packed = math.ceil(inputs * self.bits / WORD_BITS)
        if self.kind in ("fp8", "float", "int"):
            scale = "weight_scale_inv" if self.kind == "fp8" else "weight_scale"
            parts: Shapes = {"weight": ((outputs, inputs), self.codes), scale: (shape, self.scales)}
            return parts | ({"weight_zero_point": (shape, self.zeros)} if self.zeros else {})
        if self.kind == "packed":
            parts = {"weight_packed": ((outputs, packed), self.codes), "weight_scale": (grid, self.scales)}
            zeros = math.ceil(outputs * self.bits / WORD_BITS), grid[1]
            parts |= {"weight_zero_point": (zeros, self.zeros)} if self.zeros else {}
            return parts | {"weight_shape": ((2,), "int64")}
        codes = (packed, outputs) if self.kind == "gptq" else (inputs, outputs // words)
        parts = {"qweight": (codes, self.codes), "qzeros": ((grid[1], outputs // words), self.zeros)}
        parts |= {"scales": ((grid[1], outputs), self.scales)}
        return parts | ({"g_idx": ((inputs,), "int32")} if self.ordered else {})

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight (O, I) of its parts, rounded once, to `dtype`; fused experts of mxfp4 as (E, I, O).

        With codes, zeros and scales of at most 8, 8 and 11 significant bits the product is exact in float32. Parts by
        compressed-tensors are first rounded to the dtype of their scales, as that package does.
        """
        if self.kind == "mxfp4":
            weight_EOI = decode_mxfp4(parts["blocks"], parts["scales"], getattr(torch, self.dtype))
            return weight_EOI.transpose(-1, -2).contiguous()
        codes, scales_RC, zeros_RC = getattr(self, f"_{self.kind}")(parts)
        weight_OI = codes.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        columns_I = parts["g_idx"].long() if self.ordered else None
        if zeros_RC is not None:
            self._spread(Tensor.sub_, weight_OI, zeros_RC, columns_I)
        self._spread(Tensor.mul_, weight_OI, scales_RC, columns_I)
        if self.kind in ("float", "int", "packed"):
            weight_OI = weight_OI.to(scales_RC.dtype)
        return cast(Tensor, weight_OI.to(getattr(torch, self.dtype)))

    def _spread(self, apply_: Any, weight_OI: Tensor, grid_RC: Tensor, columns_I: Tensor | None) -> None:
        """Change the numbers of a weight by those of the grid. `columns_I`: the column of the grid for each column."""
        rows, columns = self.block
        grid_RI = grid_RC.float()
        if columns_I is not None:
            grid_RI = grid_RI[:, columns_I]
        elif columns > 1 and grid_RI.shape[1] > 1:
            grid_RI = grid_RI.repeat_interleave(columns, 1)[:, : weight_OI.shape[1]]
        if rows > 1:
            for block, row in zip(weight_OI.split(rows), grid_RI, strict=True):
                apply_(block, row)
        else:
            apply_(weight_OI, grid_RI)

    def _fp8(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        return parts["weight"], self._as_grid(parts["weight_scale_inv"]), None

    def _float(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        zeros = parts.get("weight_zero_point")
        return parts["weight"], self._as_grid(parts["weight_scale"]), zeros if zeros is None else self._as_grid(zeros)

    _int = _float

    def _as_grid(self, scales: Tensor) -> Tensor:
        return scales if scales.ndim == 2 else scales.reshape(-1, 1)

    def _packed(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, columns = parts["weight_packed"].shape[0], int(parts["weight_shape"][1])
        zeros_RC = None
        if self.zeros:
            zeros_RC = unpacked(parts["weight_zero_point"].T, self.bits, rows).T - 2 ** (self.bits - 1)
        codes_OI = unpacked(parts["weight_packed"], self.bits, columns) - 2 ** (self.bits - 1)
        return codes_OI, parts["weight_scale"], zeros_RC

    def _gptq(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        scales_RC = parts["scales"].T
        columns = parts["qweight"].shape[0] * WORD_BITS // self.bits
        codes_OI = unpacked(parts["qweight"].T, self.bits, columns)
        zeros_RC = unpacked(parts["qzeros"], self.bits, scales_RC.shape[0]).T + self.offset
        return codes_OI, scales_RC, zeros_RC & (2**self.bits - 1)

    def _awq(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        rows = parts["scales"].shape[1]
        codes_IO, zeros_CR = (unpacked(parts[name], self.bits, rows) for name in ("qweight", "qzeros"))
        order = torch.tensor(AWQ_ORDER, device=codes_IO.device)
        codes_IO, zeros_CR = (each.unflatten(1, (-1, 8))[..., order].flatten(1) for each in (codes_IO, zeros_CR))
        return codes_IO.T, parts["scales"].T, zeros_CR.T


def unpacked(words_OW: Tensor, bits: int, columns: int) -> Tensor:
    """Return the unsigned numbers (O, `columns`) int32 in words (O, W), lowest bits first.

    A number may begin in one word and end in the next.
    """
    mask = 2**bits - 1
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, device=words_OW.device, dtype=torch.int32)
        spread_OI: Tensor = (words_OW[..., None] >> shifts & mask).flatten(1)
        return spread_OI[:, :columns]
    begins_I = torch.arange(columns, device=words_OW.device) * bits
    word_I, shift_I = begins_I // WORD_BITS, begins_I % WORD_BITS
    wide_OW = nn.functional.pad(words_OW.long() & 0xFFFFFFFF, (0, 1))
    both_OI = wide_OW[:, word_I] | wide_OW[:, word_I + 1] << WORD_BITS
    numbers_OI: Tensor = (both_OI >> shift_I & mask).int()
    return numbers_OI


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (..., G · 32) of blocks (..., G, 16) and scales (..., G) uint8: code · 2^(scale - 127).

    The low half of a byte is the first of its two numbers.
    """
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=blocks.device)
    pairs = torch.stack([table[(half.int()).long()] for half in (blocks & 15, blocks >> 4)], dim=-1)
    numbers: Tensor = torch.ldexp(pairs.flatten(-2), (scales.int() - E8M0_BIAS)[..., None])
    return numbers.flatten(-2).to(dtype)


class StoredLinear(nn.Module):
    """A linear whose weight stays in its stored format in memory; each call decodes it whole."""

    def __init__(self, linear: nn.Linear, form: StoredFormat) -> None:
        """Take the place of a linear, whose bias stays."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.form = form
        for name, (shape, dtype) in form.parts(linear.out_features, linear.in_features).items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I) by the weight, in the dtype of x."""
        weight_OI = self.form.decode(dict(self.named_buffers(recurse=False)))
        out: Tensor = nn.functional.linear(x, weight_OI.to(x.dtype), self.bias)
        return out


def stored_modules(groups: Iterable[Mapping[str, Any]]) -> dict[str, StoredFormat]:
    """Return path -> format of the modules that `stored_formats` of a config lists. Raises ValueError if it is odd."""
    modules: dict[str, StoredFormat] = {}
    for group in groups:
        fields = dict(group)
        try:
            paths = fields.pop("modules")
            form = StoredFormat(**{**fields, "block": tuple(fields["block"])})
            form.parts(1, 1)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"config.json: {FIELD}: {group!r:.200} describes no format: {error}") from error
        modules |= dict.fromkeys(paths, form)
    return modules


def attach_stored(root: nn.Module, modules: Mapping[str, StoredFormat]) -> None:
    """Replace the linears at these paths below `root`. Raises ValueError for a path that is no linear."""
    for path, form in modules.items():
        parent_path, _, name = path.rpartition(".")
        try:
            parent = root.get_submodule(parent_path)
            module: nn.Module | None = parent.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear):
            raise ValueError(f"config.json: {FIELD}: {path} is no linear of this model")
        parent.add_module(name, StoredLinear(module, form))
