"""Everything on disk: source shards, statistics and activations (Zarr), ledger, lock, texts, the output's shards."""

PROJECT = "Lamina"
