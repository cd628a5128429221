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
| mxfp4 | weight_blocks, weight_scales | two e2m1 numbers in a byte, with a power of two for every 32 |

O outputs (rows), I inputs (columns), R rows and C columns of the grid.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[tuple[int, ...], str]]  # part -> shape and dtype
WORD_BITS = 32
assert sys.byteorder == "little", "words of packed numbers begin with their lowest byte"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of four-bit codes of each of eight rows
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
BLOCK_NUMBERS, DEVICE_NUMBERS = 2**17, 2**24  # decoded at a time, on a CPU and elsewhere
ROUNDED_FIRST, TRANSPOSED = ("float", "int", "packed"), ("gptq", "awq")
FIELD = "stored_formats"  # of config.json


@dataclass(frozen=True)
class StoredFormat:
    """The tensors that hold a weight, and the dtype that they decode to.

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
        if self.kind == "mxfp4":
            blocks = (*grid, self.block[1] * self.bits // 8)
            return {"weight_blocks": (blocks, self.codes), "weight_scales": (grid, self.scales)}
        codes = (packed, outputs) if self.kind == "gptq" else (inputs, outputs // words)
        parts = {"qweight": (codes, self.codes), "qzeros": ((grid[1], outputs // words), self.zeros)}
        parts |= {"scales": ((grid[1], outputs), self.scales)}
        return parts | ({"g_idx": ((inputs,), "int32")} if self.ordered else {})

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight (O, I) of its parts, rounded once, to `dtype`.

        With codes, zeros and scales of at most 8, 8 and 11 significant bits the product is exact in float32. Parts by
        compressed-tensors are first rounded to the dtype of their scales, as that package does. Rows of the stored
        codes are decoded some at a time, so that they stay in a CPU's cache and take little of a GPU's memory. Runs on
        the device of the parts, and gives the same numbers on each.
        """
        codes: Codes = getattr(self, f"_{self.kind}")(parts)
        dtype, first = getattr(torch, self.dtype), codes.scales.dtype if self.kind in ROUNDED_FIRST else torch.float32
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.stored.device)
        rows, columns = codes.shape
        step = max(1, (BLOCK_NUMBERS if weight.device.type == "cpu" else DEVICE_NUMBERS) // columns)
        step = max(codes.rows_stored, step // codes.rows_stored * codes.rows_stored)
        scales, zeros = codes.scales.float(), None if codes.zeros is None else codes.zeros.float()
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            numbers = codes.read(codes.stored[begin // codes.rows_stored : math.ceil(end / codes.rows_stored)])
            if zeros is not None:
                codes.spread(Tensor.sub_, numbers, zeros[codes.groups[begin:end]])
            codes.spread(Tensor.mul_, numbers, scales[codes.groups[begin:end]])
            weight[begin:end] = numbers.to(first)
        return weight.T.contiguous() if self.kind in TRANSPOSED else weight

    def _bytes(self, parts: Mapping[str, Tensor], scales: Tensor) -> "Codes":
        """Return codes of eight bits: integers, or fp8 numbers, which a table of all 256 decodes much faster."""
        stored, zeros = parts["weight"], parts.get("weight_zero_point")
        grid, read = _as_grid(scales), cast(Callable[[Tensor], Tensor], Tensor.float)
        if stored.is_floating_point():
            table = torch.arange(256, dtype=torch.uint8, device=stored.device).view(stored.dtype).float()
            stored, read = stored.view(torch.uint8), partial(_looked_up, table)
        return self._rows(stored, tuple(stored.shape), read, grid, None if zeros is None else _as_grid(zeros))

    def _fp8(self, parts: Mapping[str, Tensor]) -> "Codes":
        return self._bytes(parts, parts["weight_scale_inv"])

    def _float(self, parts: Mapping[str, Tensor]) -> "Codes":
        return self._bytes(parts, parts["weight_scale"])

    _int = _float

    def _packed(self, parts: Mapping[str, Tensor]) -> "Codes":
        stored, low = parts["weight_packed"], -(2 ** (self.bits - 1))
        rows, columns = stored.shape[0], int(parts["weight_shape"][1])
        zeros_RC = None
        if self.zeros:
            zeros_RC = unpacked(parts["weight_zero_point"].T, self.bits, rows).T + low
        if self.bits == 4:
            read = partial(_halves, _pairs([number + low for number in range(16)], stored.device), columns)
        else:
            read = partial(_words, self.bits, columns, low)
        return self._rows(stored, (rows, columns), read, parts["weight_scale"], zeros_RC)

    def _rows(
        self, stored: Tensor, shape: tuple[int, ...], read: Any, scales_RC: Tensor, zeros_RC: Tensor | None
    ) -> "Codes":
        """Return codes that are stored by rows of the weight."""
        rows, columns = self.block
        groups = torch.arange(shape[0], device=stored.device)
        groups = groups // rows if rows else torch.zeros_like(groups)
        return Codes(stored, (shape[0], shape[1]), read, scales_RC, zeros_RC, groups, columns)

    def _gptq(self, parts: Mapping[str, Tensor]) -> "Codes":
        stored, scales_CO = parts["qweight"], parts["scales"]
        inputs, outputs = stored.shape[0] * WORD_BITS // self.bits, stored.shape[1]
        zeros_CO = unpacked(parts["qzeros"], self.bits, outputs) + self.offset & 2**self.bits - 1
        read, words = partial(_columns, self.bits), WORD_BITS // self.bits
        groups = parts["g_idx"].long() if self.ordered else self._groups(inputs, stored)
        return Codes(stored, (inputs, outputs), read, scales_CO, zeros_CO, groups, 1, words)

    def _awq(self, parts: Mapping[str, Tensor]) -> "Codes":
        stored, scales_CO = parts["qweight"], parts["scales"]
        zeros_CO, shape = _awq_words(parts["qzeros"]), (stored.shape[0], scales_CO.shape[1])
        return Codes(stored, shape, _awq_words, scales_CO, zeros_CO, self._groups(shape[0], stored), 1)

    def _groups(self, inputs: int, stored: Tensor) -> Tensor:
        columns = torch.arange(inputs, device=stored.device)
        return columns // self.block[1] if self.block[1] else torch.zeros_like(columns)

    def _mxfp4(self, parts: Mapping[str, Tensor]) -> "Codes":
        blocks, scales = parts["weight_blocks"].flatten(1), parts["weight_scales"]
        read = partial(_halves, _pairs([*E2M1, *(-value for value in E2M1)], blocks.device), 2 * blocks.shape[1])
        powers = torch.ldexp(torch.ones(256), torch.arange(256) - E8M0_BIAS).to(blocks.device)
        return self._rows(blocks, (blocks.shape[0], 2 * blocks.shape[1]), read, powers[scales.int()], None)


class Codes(NamedTuple):
    """Codes in the layout in which they are stored.

    Attributes:
        stored: the tensor of codes.
        shape: of the numbers: the weight's, or the transposed weight's.
        read: returns the numbers, float32, of some rows of `stored`.
        scales, zeros: a row for each group of rows of numbers.
        groups: for each row of numbers, its row of `scales`.
        columns: how many columns share a column of `scales`; 0: all.
        rows_stored: the rows of numbers in a row of `stored`.
    """

    stored: Tensor
    shape: tuple[int, int]
    read: Callable[[Tensor], Tensor]
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    columns: int
    rows_stored: int = 1

    def spread(self, apply_: Callable[[Tensor, Tensor], Any], numbers: Tensor, grid: Tensor) -> None:
        """Change numbers by those of the grid for their rows."""
        if grid.shape[1] == 1 or self.columns == 1:
            apply_(numbers, grid)
        elif numbers.shape[1] % self.columns:
            apply_(numbers, grid.repeat_interleave(self.columns, 1)[:, : numbers.shape[1]])
        else:
            apply_(numbers.unflatten(1, (-1, self.columns)), grid[..., None])


def _as_grid(scales: Tensor) -> Tensor:
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return torch.index_select(table, 0, codes.flatten().int()).view(codes.shape)


def _pairs(values: list[float], device: torch.device) -> Tensor:
    """Return for each byte the values of its lower and its upper half, two float32 in the place of a float64."""
    table = torch.tensor(values, dtype=torch.float32, device=device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)
    return pairs.view(torch.float64).flatten()


def _halves(pairs: Tensor, columns: int, codes: Tensor) -> Tensor:
    halves = codes.contiguous().view(torch.uint8)
    numbers = torch.index_select(pairs, 0, halves.flatten().int()).view(torch.float32)
    return numbers.view(codes.shape[0], -1)[:, :columns]


def _words(bits: int, columns: int, low: int, codes: Tensor) -> Tensor:
    return unpacked(codes, bits, columns).float().add_(low)


def _columns(bits: int, codes: Tensor) -> Tensor:
    """Return the numbers (W · 32 / bits, O) of words (W, O) that each hold some of a column."""
    shifts = range(0, WORD_BITS, bits)
    numbers = torch.empty(codes.shape[0], len(shifts), codes.shape[1], device=codes.device)
    for place, shift in enumerate(shifts):
        numbers[:, place] = codes >> shift & 2**bits - 1
    return numbers.flatten(0, 1)


def _awq_words(codes: Tensor) -> Tensor:
    numbers = torch.empty(*codes.shape, len(AWQ_ORDER), device=codes.device)
    for place, half in enumerate(AWQ_ORDER):
        numbers[..., place] = codes >> 4 * half & 15
    return numbers.flatten(1)


def unpacked(words_OW: Tensor, bits: int, columns: int) -> Tensor:
    """Return the unsigned numbers (O, `columns`) int32 in words (O, W), lowest bits first.

    A number may begin in one word and end in the next.
    """
    mask = 2**bits - 1
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, device=words_OW.device, dtype=torch.int32)
        spread_OI: Tensor = (words_OW[..., None] >> shifts & mask).flatten(1)
        return spread_OI[:, :columns]
    groups = math.ceil(columns / 8)  # of eight numbers, which fill `bits` bytes
    lacking = max(0, math.ceil(groups * bits / 4) - words_OW.shape[1])
    bytes_OB = nn.functional.pad(words_OW, (0, lacking)).contiguous().view(torch.uint8)
    bytes_OBb = bytes_OB[:, : groups * bits].unflatten(1, (-1, bits))
    numbers_OB8 = bytes_OBb.new_empty(*bytes_OBb.shape[:2], 8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        numbers_OB8[..., place] = bytes_OBb[..., byte] >> shift
        if shift + bits > 8:
            numbers_OB8[..., place] |= bytes_OBb[..., byte + 1] << (8 - shift)
    numbers_OI: Tensor = (numbers_OB8 & mask).flatten(1)[:, :columns].int()
    return numbers_OI


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
    """Replace the linears at these paths below `root`. Raises ValueError for a path that is not a linear."""
    for path, form in modules.items():
        parent_path, _, name = path.rpartition(".")
        try:
            parent = root.get_submodule(parent_path)
            module: nn.Module | None = parent.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear):
            raise ValueError(f"config.json: {FIELD}: {path} is not a linear of this model")
        parent.add_module(name, StoredLinear(module, form))


def decoded_weights(
    tensors: Iterable[tuple[str, Tensor]], modules: Mapping[str, StoredFormat]
) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors with `PATH.weight` in place of the parts of each of these modules, once all have come.

    Raises ValueError for a module some of whose parts do not come.
    """
    places = {f"{path}.{part}": (path, part) for path, form in modules.items() for part in form.parts(1, 1)}
    coming: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if name not in places:
            yield name, tensor
            continue
        path, part = places[name]
        parts, form = coming.setdefault(path, {}), modules[path]
        parts[part] = tensor
        if len(parts) == len(form.parts(1, 1)):
            yield f"{path}.weight", form.decode(coming.pop(path))
    if coming:
        path, parts = next(iter(coming.items()))
        lacking = ", ".join(part for part in modules[path].parts(1, 1) if part not in parts)
        raise ValueError(f"the checkpoint lacks {lacking} of {path}, which config.json's {FIELD} describes")
