"""What becomes of the sums that workers have given away: added, held against their grids, stored, solved from.

They come from where tensors are passed on, in the host's memory, and are added on the device, on a stream of their own,
so that what is computed there does not wait. The tensors of a sum are its bands (`pipeline.kernels.exact_sums`), by
their place as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from manifests.errors import NumericsError
from manifests.records import ArrayRecord
from pipeline.kernels.exact_pairs import whole_pair
from pipeline.kernels.exact_sums import Grid, exceeding, moment_rows, whole_moment
from pipeline.methods.method import Moment
from pipeline.sum_units import Add, AddDone, CheckGrids, CheckGridsDone, Summed, Total
from stores.statistics import StatisticsStore
from workers.tensor_transfer import TensorTransfer, get_all


class Totals:
    """Holds nothing between its calls: they may be made beside a worker's other units."""

    def __init__(self, transfer: TensorTransfer, statistics: StatisticsStore, device: torch.device) -> None:
        self.transfer = transfer
        self.statistics = statistics
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, unit: Add) -> AddDone:
        """Adds a part of some sums, in any order."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return AddDone(self.transfer.put(_added(get_all(self.transfer, unit.partials), self.device)))

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
        grid, bands = self._bands(unit.summed)
        groups, width = grid.exponents.shape
        name = f"{unit.lineage}-{unit.moment.key}"
        return self.statistics.write_rows(
            unit.layer, name, groups, width, lambda start, stop: moment_rows(bands, grid, start, stop)
        )

    def moment(self, moment: Moment, found: ArrayRecord | Summed, device: torch.device) -> Tensor:
        """A moment (G, d, d) float64 on a device, of a pair (1, F + D, F)."""
        if isinstance(found, ArrayRecord):
            return self.statistics.read(found).to(device)
        grid, bands = self._bands(found)
        whole = whole_pair if moment.kind == "pair" else whole_moment
        return whole([band_Gbd.to(device) for band_Gbd in bands], grid)

    def _bands(self, summed: Summed) -> tuple[Grid, list[Tensor]]:
        named = _added(get_all(self.transfer, summed.partials))
        return Grid.unpacked(self.transfer.get(summed.grid)), [named[place] for place in sorted(named)]


def _added(parts: Iterable[dict[str, Tensor]], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The sum of all parts on a device, by name: what only one of them has is as it is, not to be written to."""
    total: dict[str, Tensor] = {}
    own: set[str] = set()
    for part in parts:
        for name, given in part.items():
            tensor = given.to(device)
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
        raise NumericsError(f"layer {layer}: activations at {moment.point}: {error}") from error
