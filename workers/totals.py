"""What becomes of the sums that workers have given away: added, held against their grids, stored, solved from.

They come from where tensors are passed on, in the host's memory, and are added on the device, on a stream of their own,
so that what is computed there does not wait. The tensors of a sum are its bands (`pipeline.kernels.exact_sums`), by
their place as text.
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
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, AddDone, CheckGrids, CheckGridsDone, Summed, Total
from stores.statistics import StatisticsStore
from workers.copies import Copies
from workers.sums import NORMS
from workers.tensor_transfer import TensorTransfer, get_all


class Totals:
    """Holds nothing between its calls: they may be made beside a worker's other units."""

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
        """Adds a part of some sums, in any order."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return AddDone(self.transfer.put(_added(get_all(self.transfer, unit.partials), self._brought)))

    def _brought(self, tensor: Tensor) -> Tensor:
        return self.copies.arrived(self.copies.bring(tensor))

    def check(self, unit: CheckGrids) -> CheckGridsDone:
        """Wider grids for the moments that exceed theirs. Raises NumericsError when there is none."""
        wider: dict[Moment, object] = {}
        for moment, handle in unit.grids.items():
            grid = Grid.unpacked(self.transfer.get(handle))
            squares_Gd = _added(get_all(self.transfer, unit.diagonals[moment]))["squares"]
            beyond_Gd = exceeding(squares_Gd, grid)
            if bool(beyond_Gd.any()):
                wider[moment] = self.transfer.put(_raised(unit.layer, moment, grid, beyond_Gd).packed())
        return CheckGridsDone(wider)

    def store(self, unit: Total) -> ArrayRecord:
        """Stores a moment, a row of tiles at a time."""
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
        """With what is known of the samples, each of one sequence; sums of theirs are rounded once."""
        norms_MG = torch.cat([norms for name, norms in sorted(named.items()) if name.startswith(NORMS)])
        squares = [math.fsum(norms_M) for norms_M in norms_MG.T.tolist()]
        sequences = len(norms_MG)
        tokens = sequences * self.tokens_shape[1]
        return GradientRecord(**dict(record), square_norms=tuple(squares), sequences=sequences, tokens=tokens)

    def moment(self, moment: Moment, found: ArrayRecord | Summed) -> Tensor:
        """A moment (G, d, d) float64 on the device, of a pair (1, F + D, F)."""
        if isinstance(found, ArrayRecord):
            return self.statistics.read(found, self._brought)
        grid, named = self._summed(found)
        bands = _bands(named)
        whole = whole_pair if moment.kind == "pair" else whole_moment
        return whole(self.copies.bring_all(bands), grid)

    def _summed(self, summed: Summed) -> tuple[Grid, dict[str, Tensor]]:
        return Grid.unpacked(self.transfer.get(summed.grid)), _added(get_all(self.transfer, summed.partials))


def _bands(named: dict[str, Tensor]) -> list[Tensor]:
    return [named[name] for name in sorted(named) if not name.startswith(NORMS)]


def _added(
    parts: Iterable[dict[str, Tensor]], brought: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """The sum of all parts where they are brought to, by name: what only one of them has is as it is, not to be written
    to."""
    total: dict[str, Tensor] = {}
    own: set[str] = set()
    for part in parts:
        for name, given in part.items():
            tensor = brought(given)
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
        what = "gradients" if moment.kind == "gradient" else "activations"
        raise NumericsError(f"layer {layer}: {what} at {moment.point}: {error}") from error
