"""Everything on a disk or in a bucket: source and output shards, statistics, activations, ledger, lock, texts."""

PROJECT = "Lamina"
