"""Adds the sums of several workers, checks them against their grids, stores them, and returns them for solving.

The sums arrive in host memory. They are added on the device, on a separate CUDA stream, so that computation does not
wait. The tensors of a sum are its bands (`pipeline.kernels.exact_sums`), named by their index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from manifests.errors import NumericsError
from manifests.records import ArrayRecord, CountedRecord, GradientRecord
from pipeline.kernels.exact_pairs import whole_pair
from pipeline.kernels.exact_sums import Grid, exceeding, moment_rows, whole_diagonal, whole_moment
from pipeline.kernels.shrinkage import shrink
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, AddDone, CheckGrids, CheckGridsDone, Summed, Total
from stores.statistics import StatisticsStore
from workers.copies import Copies
from workers.sums import NORMS
from workers.tensor_transfer import TensorTransfer, get_all


class Totals:
    """Reduces sums for a worker. It has no state, so that other units of the worker may run at the same time."""

    def __init__(
        self, transfer: TensorTransfer, statistics: StatisticsStore, device: torch.device, tokens_shape: tuple[int, int]
    ) -> None:
        """`tokens_shape`: calibration samples, and tokens of each."""
        self.transfer = transfer
        self.statistics = statistics
        self.device = device
        self.tokens_shape = tokens_shape
        self.copies = Copies(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, unit: Add) -> AddDone:
        """Add a part of several workers' sums, in any order."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return AddDone(self.transfer.put(_added(get_all(self.transfer, unit.partials), self._brought)))

    def _brought(self, tensor: Tensor) -> Tensor:
        return self.copies.arrived(self.copies.bring(tensor))

    def check(self, unit: CheckGrids) -> CheckGridsDone:
        """Return wider grids for moments that exceed theirs. Raise NumericsError if there is none."""
        wider: dict[Moment, object] = {}
        for moment, handle in unit.grids.items():
            grid = Grid.unpacked(self.transfer.get(handle))
            squares_Gd = _added(get_all(self.transfer, unit.diagonals[moment]))["squares"]
            beyond_Gd = exceeding(squares_Gd, grid)
            if bool(beyond_Gd.any()):
                wider[moment] = self.transfer.put(_raised(unit.layer, moment, grid, beyond_Gd).packed())
        return CheckGridsDone(wider)

    def store(self, unit: Total) -> ArrayRecord:
        """Store a moment, one row of tiles at a time."""
        grid, named = self._summed(unit.summed)
        gradients, bands = unit.moment.kind == "gradient", _bands(named)
        name = unit.moment.key if gradients else f"{unit.lineage}-{unit.moment.key}"
        if unit.moment.diagonal:
            record = self.statistics.write(unit.layer, name, whole_diagonal(bands[0], grid))
        else:
            groups, width = grid.exponents.shape
            record = self.statistics.write_rows(unit.layer, name, groups, width, partial(moment_rows, bands, grid))
        if gradients:
            return self._of_gradients(record, named)
        passed = unit.summed.tokens
        return record if passed == math.prod(self.tokens_shape) else CountedRecord(**dict(record), tokens=passed)

    def _of_gradients(self, record: ArrayRecord, named: dict[str, Tensor]) -> GradientRecord:
        """Add to a record the samples' squared norms, each summed with one rounding, and their number."""
        norms_MG = torch.cat([norms for name, norms in sorted(named.items()) if name.startswith(NORMS)])
        squares = [math.fsum(norms_M) for norms_M in norms_MG.T.tolist()]
        sequences = len(norms_MG)
        tokens = sequences * self.tokens_shape[1]
        return GradientRecord(**dict(record), square_norms=tuple(squares), sequences=sequences, tokens=tokens)

    def moment(self, moment: Moment, source: ArrayRecord | Summed) -> Tensor:
        """Return a moment (G, d, d), or of a pair (1, F + D, F), in float64 on the device."""
        if isinstance(source, ArrayRecord):
            return self.statistics.read(source, self._brought)
        grid, named = self._summed(source)
        bands = _bands(named)
        whole = whole_pair if moment.kind == "pair" else whole_moment
        return whole(self.copies.bring_all(bands), grid)

    def shrunk(self, moment: Moment, source: ArrayRecord | Summed) -> Tensor:
        """Return a moment as methods receive it: for gradients, the mean shrunk towards its diagonal."""
        total = self.moment(moment, source)
        if not isinstance(source, GradientRecord):
            return total
        squares_G = torch.tensor(source.square_norms, dtype=torch.float64, device=total.device)
        return shrink(total, squares_G, source.sequences, source.tokens)

    def _summed(self, summed: Summed) -> tuple[Grid, dict[str, Tensor]]:
        return Grid.unpacked(self.transfer.get(summed.grid)), _added(get_all(self.transfer, summed.partials))


def _bands(named: dict[str, Tensor]) -> list[Tensor]:
    return [named[name] for name in sorted(named) if not name.startswith(NORMS)]


def _added(
    parts: Iterable[dict[str, Tensor]], brought: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """Add all parts by name to `brought`. A tensor of only one part is returned without a copy."""
    total: dict[str, Tensor] = {}
    own: set[str] = set()
    for part in parts:
        for name, tensor in part.items():
            tensor = brought(tensor)
            if name in own:
                total[name].add_(tensor)
            elif name in total:
                total[name] = total[name] + tensor
                own.add(name)
            else:
                total[name] = tensor
    return total


def _raised(layer: int, moment: Moment, grid: Grid, beyond_Gd: Tensor) -> Grid:
    try:
        return grid.raised(beyond_Gd)
    except ValueError as error:
        kind = "gradients" if moment.kind == "gradient" else "activations"
        raise NumericsError(f"layer {layer}: {kind} at {moment.point}: {error}") from error
