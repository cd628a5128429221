"""Hidden states between layers, and the calibration tokens: written micro-batch by micro-batch, read by slices.

    <phase>/layer-00003/shard-00001/<generation>      tokens/<generation>

Shape suffixes: B samples of a shard, S sequence length, D hidden size.
"""

from __future__ import annotations

import torch

from manifests.records import ArrayRecord
from stores.arrays import ArrayStore, ArrayWriter, chunk_shape


class ActivationStore(ArrayStore):
    """The arrays of activations.zarr. An array counts once its record is in the ledger."""

    def write(self, phase: str, layer: int, shard: int, hidden_BSD: torch.Tensor, micro_batch: int = 1) -> ArrayRecord:
        """Store the hidden states that enter `layer`, in any floating dtype; durable on return.

        Chunks hold `micro_batch` samples. Return the record for the ledger entry. Raises StorageError.
        """
        samples, sequence, features = hidden_BSD.shape
        with self.writer(phase, layer, shard, (samples, sequence, features), hidden_BSD.dtype, micro_batch) as writer:
            for piece_BSD in hidden_BSD.split(micro_batch):
                writer.append(piece_BSD)
            return writer.commit()

    def writer(
        self, phase: str, layer: int, shard: int, shape: tuple[int, int, int], dtype: torch.dtype, micro_batch: int = 1
    ) -> ArrayWriter:
        """Open a shard (B, S, D) for `append`. Use it in a `with` block, which removes an uncommitted shard."""
        prefix = f"{phase}/layer-{layer:05d}/shard-{shard:05d}"
        return self.create(prefix, shape, dtype, (micro_batch, *shape[1:]))

    def write_tokens(self, ids_BS: torch.Tensor) -> ArrayRecord:
        """Store token ids, int32 or int64; durable on return. Raises ValueError and StorageError."""
        if ids_BS.dtype not in (torch.int32, torch.int64) or ids_BS.ndim != 2:
            shape = tuple(ids_BS.shape)
            raise ValueError(f"token ids: {ids_BS.dtype} {shape}, expected int32 or int64 (samples, sequence)")
        with self.create("tokens", ids_BS.shape, ids_BS.dtype, chunk_shape(ids_BS.shape)) as writer:
            writer.write_((slice(ids_BS.shape[0]), slice(ids_BS.shape[1])), ids_BS)
            return writer.commit()
