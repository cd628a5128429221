"""Sums of calibration statistics, one array each: `layer-00003/<name>/<generation>`.

A float64 moment that equals its transpose bit for bit is stored by its upper tiles only
(-44 % at 8192; docs/formats.md#arrays).

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
STRIP = 64  # rows that are mirrored at a time: several times as fast on a CPU as more


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class StatisticsStore:
    """The arrays of one place (statistics.zarr). What is written counts once its record is in the ledger."""

    def __init__(self, place: Place, tile: int = TILE, threads: int = 1) -> None:
        """`threads`: so many rows of tiles are read or written at a time."""
        self._arrays = ArrayStore(place)
        self._tile = tile
        self._threads = threads

    def write(self, layer: int, name: str, moment: torch.Tensor, symmetric: bool = False) -> ArrayRecord:
        """Stores a statistic durably under a fresh generation: read back, it is the same bit for bit.

        `moment`: (G, F, F) float64 sums, or anything else (stored plainly). `symmetric`: that it equals its transpose
        bit for bit is known, and not looked for. Returns the record for the ledger entry.
        Holds one row of tiles besides the moment. Raises StorageError.
        """
        in_tiles = self._has_tiles(moment)
        symmetric = in_tiles and (symmetric or self._is_symmetric(moment))
        chunks = chunk_shape(moment.shape, self._tile)
        prefix = f"layer-{layer:05d}/{name}"
        with self._arrays.create(prefix, moment.shape, moment.dtype, chunks, upper_tiles=symmetric) as writer:
            if symmetric:
                self._write_upper_(writer, moment)
            else:
                _write_plain_(writer, moment, chunks)
            return writer.commit()

    def write_rows(
        self, layer: int, name: str, groups: int, width: int, rows: Callable[[int, int], torch.Tensor]
    ) -> ArrayRecord:
        """As `write` of a symmetric moment (G, F, F) float64 that nobody need hold whole.

        `rows(start, stop)`: its rows from their first column on the diagonal, (G, stop - start, F - start); of each
        thread, one row of tiles at a time.
        """
        if width <= self._tile:
            return self.write(layer, name, rows(0, width), symmetric=True)
        shape = (groups, width, width)
        prefix, chunks = f"layer-{layer:05d}/{name}", chunk_shape(shape, self._tile)
        with self._arrays.create(prefix, shape, torch.float64, chunks, upper_tiles=True) as writer:

            def write(place: tuple[int, int]) -> None:
                start, stop = place
                rows_Gnc = rows(start, stop)
                for group in range(groups):
                    selection = (slice(group, group + 1), slice(start, stop), slice(start, width))
                    writer.write_(selection, rows_Gnc[group : group + 1])

            parallel_map(write, self._tile_rows(width), self._threads)
            return writer.commit()

    def read(self, record: ArrayRecord, brought: Callable[[torch.Tensor], torch.Tensor] = _itself) -> torch.Tensor:
        """The whole statistic in the dtype it was written in (float64 for moments), both triangles.

        `brought` takes a tensor to where the statistic is to be: of what is stored by its upper tiles a row of these.

        Raises:
            CorruptError: missing, damaged or other chunks; names the path. To be computed again.
            StorageError: it cannot be read.
        """
        reader = self._arrays.open(record)
        if not reader.symmetric:
            return brought(reader.read(tuple(slice(size) for size in reader.shape)))
        return self._read_upper(reader, brought)

    def drop(self, *records: ArrayRecord) -> None:
        """Removes some; retract or replace their ledger entries first. Raises StorageError."""
        self._arrays.drop(*records)

    def sweep(self, live: Iterable[ArrayRecord]) -> int:
        """Removes what no record in `live` names; only while nobody writes. Returns how many generations."""
        return self._arrays.sweep(live)

    def _has_tiles(self, moment: torch.Tensor) -> bool:
        """Whether it may be a symmetric moment of more than one tile per group, which alone has something to save."""
        square = moment.ndim == 3 and moment.shape[1] == moment.shape[2]
        return moment.dtype == torch.float64 and square and moment.shape[1] > self._tile

    def _is_symmetric(self, moment: torch.Tensor) -> bool:
        """Whether storing the upper tiles loses nothing: compared as bits, tile by tile, so that NaN and -0 count."""
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

    def _read_upper(self, reader: ArrayReader, brought: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def read(place: tuple[int, int, int]) -> torch.Tensor:
            group, start, stop = place
            return reader.read((slice(group, group + 1), slice(start, stop), slice(start, reader.shape[2])))[0]

        places, moment_GFF = self._upper_rows(reader.shape), None
        for (group, start, stop), row in zip(places, parallel_imap(read, places, self._threads), strict=True):
            row_nc = brought(row)
            if moment_GFF is None:
                moment_GFF = row_nc.new_empty(reader.shape)
            moment_GFF[group, start:stop, start:] = row_nc
            for first in range(start, stop, STRIP):
                strip_nc = row_nc[first - start : first - start + STRIP, stop - start :]
                moment_GFF[group, stop:, first : first + len(strip_nc)] = strip_nc.T
        assert moment_GFF is not None
        return moment_GFF

    def _upper_rows(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Group, first row and the one behind the last, of each row of tiles."""
        return [(group, *rows) for group in range(shape[0]) for rows in self._tile_rows(shape[1])]

    def _tile_rows(self, num_features: int) -> Iterable[tuple[int, int]]:
        return ((start, min(start + self._tile, num_features)) for start in range(0, num_features, self._tile))


def _write_plain_(writer: ArrayWriter, values: torch.Tensor, chunks: tuple[int, ...]) -> None:
    """Writes slab by slab along the first axis, so that a tensor on a device is never copied whole."""
    rest = tuple(slice(size) for size in values.shape[1:])
    if not values.shape:
        writer.write_((), values)
        return
    for start in range(0, values.shape[0], chunks[0]):
        stop = min(start + chunks[0], values.shape[0])
        writer.write_((slice(start, stop), *rest), values[start:stop])
