"""Sums of calibration statistics, one array each: `layer-00003/<name>/<generation>`.

Of a float64 moment that equals its transpose bit for bit, only the upper tiles are stored (44 % fewer bytes at 8192;
docs/formats.md#arrays).

Shape suffixes: G groups (KV heads, or 1), F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from manifests.records import ArrayRecord
from stores.arrays import ArrayReader, ArrayStore, ArrayWriter, chunk_shape
from stores.storage import Place
from stores.threads import parallel_imap, parallel_map

TILE = 1024
STRIP = 64  # rows mirrored at a time: on a CPU several times as fast as more


class StatisticsStore(ArrayStore):
    """The arrays of statistics.zarr. An array counts once its record is in the ledger."""

    def __init__(self, place: Place, tile: int = TILE, threads: int = 1) -> None:
        """`threads`: the number of rows of tiles read or written at a time."""
        super().__init__(place)
        self._tile = tile
        self._threads = threads

    def write(self, layer: int, name: str, moment: torch.Tensor, symmetric: bool = False) -> ArrayRecord:
        """Store a statistic durably under a new generation; `read` returns the same bits.

        `moment`: (G, F, F) float64 sums, or any other tensor, stored plainly. `symmetric`: the moment is known to equal
        its transpose bit for bit, so that this is not tested. Needs memory for one row of tiles besides the moment.
        Return the record for the ledger entry. Raises StorageError.
        """
        in_tiles = self._has_tiles(moment)
        symmetric = in_tiles and (symmetric or self._is_symmetric(moment))
        chunks = chunk_shape(moment.shape, self._tile)
        prefix = f"layer-{layer:05d}/{name}"
        with self.create(prefix, moment.shape, moment.dtype, chunks, upper_tiles=symmetric) as writer:
            if symmetric:
                self._write_upper_(writer, moment)
            else:
                _write_plain_(writer, moment)
            return writer.commit()

    def write_rows(
        self, layer: int, name: str, groups: int, width: int, rows: Callable[[int, int], torch.Tensor]
    ) -> ArrayRecord:
        """Store a symmetric (G, F, F) float64 moment that need not fit into memory, as `write` does.

        Args:
            groups: G.
            width: F.
            rows: `rows(start, stop)` returns rows from column `start` on, (G, stop - start, F - start), float64. Each
                thread calls it for one row of tiles at a time.
        """
        if width <= self._tile:
            return self.write(layer, name, rows(0, width), symmetric=True)
        shape = (groups, width, width)
        prefix, chunks = f"layer-{layer:05d}/{name}", chunk_shape(shape, self._tile)
        with self.create(prefix, shape, torch.float64, chunks, upper_tiles=True) as writer:

            def write(place: tuple[int, int]) -> None:
                start, stop = place
                rows_Gnc = rows(start, stop)
                for group in range(groups):
                    selection = (slice(group, group + 1), slice(start, stop), slice(start, width))
                    writer.write_(selection, rows_Gnc[group : group + 1])

            parallel_map(write, self._tile_rows(width), self._threads)
            return writer.commit()

    def read(
        self, record: ArrayRecord, transfer: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> torch.Tensor:
        """Return the whole statistic in its stored dtype (float64 for moments), both triangles.

        `transfer` moves a tensor to the device of the result; symmetric moments are moved by rows of tiles.

        Raises:
            CorruptError: missing, damaged or other chunks; names the path. Compute the statistic again.
            StorageError: it cannot be read.
        """
        reader = self.open(record)
        if not reader.symmetric:
            return transfer(reader.select(tuple(map(slice, reader.shape))))
        return self._read_upper(reader, transfer)

    def _has_tiles(self, moment: torch.Tensor) -> bool:
        """True for square float64 moments of more than one tile per group: only they have tiles to leave out."""
        square = moment.ndim == 3 and moment.shape[1] == moment.shape[2]
        return moment.dtype == torch.float64 and square and moment.shape[1] > self._tile

    def _is_symmetric(self, moment: torch.Tensor) -> bool:
        """True if the moment equals its transpose, compared as bits, so that NaN and -0 count."""
        bits_GFF = moment.detach().view(torch.int64)
        for bits_FF in bits_GFF:
            for start, stop in self._tile_rows(moment.shape[1]):
                if not torch.equal(bits_FF[start:stop, stop:], bits_FF[stop:, start:stop].T):
                    return False
        return True

    def _write_upper_(self, writer: ArrayWriter, moment_GFF: torch.Tensor) -> None:
        for group, start, stop in self._upper_rows(moment_GFF.shape):
            selection = (slice(group, group + 1), slice(start, stop), slice(start, moment_GFF.shape[2]))
            writer.write_(selection, moment_GFF[selection])

    def _read_upper(self, reader: ArrayReader, transfer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def read(place: tuple[int, int, int]) -> torch.Tensor:
            group, start, stop = place
            return reader.select((slice(group, group + 1), slice(start, stop), slice(start, reader.shape[2])))[0]

        places, moment_GFF = self._upper_rows(reader.shape), None
        for (group, start, stop), row in zip(places, parallel_imap(read, places, self._threads), strict=True):
            row_nc = transfer(row)
            if moment_GFF is None:
                moment_GFF = row_nc.new_empty(reader.shape)
            moment_GFF[group, start:stop, start:] = row_nc
            for first in range(start, stop, STRIP):
                strip_nc = row_nc[first - start : first - start + STRIP, stop - start :]
                moment_GFF[group, stop:, first : first + len(strip_nc)] = strip_nc.T
        assert moment_GFF is not None
        return moment_GFF

    def _upper_rows(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (group, start, stop) of each row of tiles."""
        return [(group, *rows) for group in range(shape[0]) for rows in self._tile_rows(shape[1])]

    def _tile_rows(self, num_features: int) -> Iterable[tuple[int, int]]:
        return ((start, min(start + self._tile, num_features)) for start in range(0, num_features, self._tile))


def _write_plain_(writer: ArrayWriter, values: torch.Tensor) -> None:
    """Write chunk by chunk along the first axis, so that a tensor on a device is never copied whole."""
    if not values.shape:
        writer.write_((), values)
        return
    for piece in values.split(writer.chunks[0]):
        writer.append(piece)
