"""What `verify` checks of a compressed checkpoint: digests, coverage, shapes, finite values, counts, logits.

Every check reads the files themselves, a tensor or a layer at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from manifests.errors import CorruptError, InputError, StorageError
from pipeline.families.registry import geometry_of, standard_config
from pipeline.job.assemble import CONTRACT_FILE, CONTRACT_VERSION, stored_numbers
from pipeline.job.perplexity import expected_tensors, read_checkpoint
from stores.checkpoint import verify_shard
from stores.durable import read_whole
from stores.headers import DTYPES
from stores.source import MAX_JSON_BYTES, SourceCheckpoint, open_source, raise_faults
from workers.ends import embedding, head
from workers.layers import LayerReader
from workers.setup import Setup

SHOWN_CHARACTERS = 200
SAMPLE_SHAPE = (2, 64)  # token ids of the logits check
EXACT_BOUND = 1e-3  # relative error of the logits when nothing was cut off
LOSSY_BOUND = 1.0  # the error of answering with the mean logits everywhere


@dataclass(frozen=True)
class Finding:
    """The result of one check; `faults` is empty when it passed."""

    check: str
    detail: str
    faults: tuple[str, ...] = ()


def verify(output: Path, source: Path | None, bound: float | None = None) -> Iterator[Finding]:
    """The findings, one check after another. Raises InputError when `output` is no Lamina checkpoint at all."""
    contract = read_contract(output)
    yield _digests(output, contract)
    try:
        checkpoint, config = read_checkpoint(str(output))
    except InputError as error:
        yield Finding("contents", "cannot be opened", (str(error),))
        return
    yield _contents(checkpoint, contract)
    shapes = _shapes(checkpoint, config)
    yield shapes
    yield _finite(checkpoint)
    yield _counts(checkpoint, contract)
    if source is not None:
        original = open_source(str(source))
        yield _coverage(original, checkpoint, contract)
        if not shapes.faults:
            yield _logits(original, checkpoint, config, contract, bound)


def read_contract(output: Path) -> dict[str, Any]:
    """compression.json. Raises InputError: missing, not JSON, of another version."""
    path = output / CONTRACT_FILE
    try:
        contract: dict[str, Any] = json.loads(read_whole(path, MAX_JSON_BYTES))
        version = contract["version"]
    except (OSError, StorageError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); is it a Lamina checkpoint?"
        ) from error
    if version != CONTRACT_VERSION:
        raise InputError(f"{path}: version {version}, this Lamina knows {CONTRACT_VERSION}")
    try:
        _Contract.model_validate(contract)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise_faults(f"{path}: damaged", [fault[:SHOWN_CHARACTERS] for fault in faults])
    return contract


class _Checked(BaseModel):
    """What the checks read of compression.json; what else it holds does not matter."""

    model_config = ConfigDict(strict=True)


class _TensorEntry(_Checked):
    dtype: str
    shape: list[int]
    shard: str
    sha256: str


class _ShardEntry(_Checked):
    size: int
    sha256: str


class _Count(_Checked):
    dense: int
    compressed: int


class _Counts(_Checked):
    parameters: _Count
    bytes: _Count


class _Contract(_Checked):
    shards: dict[Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")], _ShardEntry]
    tensors: dict[str, _TensorEntry]
    counts: _Counts
    source: dict[str, Any]
    claimed: dict[str, str] = {}


def _digests(output: Path, contract: Mapping[str, Any]) -> Finding:
    faults = []
    for shard, record in contract["shards"].items():
        tensors = {name: entry for name, entry in contract["tensors"].items() if entry["shard"] == shard}
        try:
            verify_shard(output / shard, {**record, "tensors": tensors})
        except (CorruptError, InputError) as error:
            faults.append(str(error))
    return Finding("digests", f"{len(contract['shards'])} shards against sha256", tuple(faults))


def _contents(checkpoint: SourceCheckpoint, contract: Mapping[str, Any]) -> Finding:
    """Index, headers and contract name the same tensors of the same shapes and dtypes."""
    promised, found = contract["tensors"], checkpoint.tensors
    faults = [f"{name}: in compression.json only" for name in sorted(promised.keys() - found.keys())]
    faults += [f"{name}: not in compression.json" for name in sorted(found.keys() - promised.keys())]
    for name in sorted(promised.keys() & found.keys()):
        record, entry = found[name], promised[name]
        actual = (record.dtype, list(record.shape), Path(record.file).name)
        if actual != (entry["dtype"], entry["shape"], entry["shard"]):
            faults.append(
                f"{name}: {actual}, compression.json says {entry['dtype']}, {entry['shape']}, {entry['shard']}"
            )
    return Finding("contents", f"{len(found)} tensors", tuple(faults))


def _shapes(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> Finding:
    """The model that the config describes has exactly these tensors."""
    expected = expected_tensors(config)
    faults = [f"{name}: missing" for name in sorted(expected.keys() - checkpoint.tensors.keys())]
    for name, shape in expected.items():
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != shape:
            faults.append(
                f"{name}: shape {list(checkpoint.tensors[name].shape)}, the config's forms ask for {list(shape)}"
            )
    return Finding("shapes", f"{len(expected)} tensors of the model", tuple(faults))


def _finite(checkpoint: SourceCheckpoint) -> Finding:
    faults = []
    for name in checkpoint.tensors:
        tensor = checkpoint.read([name])[name]
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            faults.append(f"{name}: holds NaN or infinity")
    return Finding("finite values", f"{len(checkpoint.tensors)} tensors", tuple(faults))


def _counts(checkpoint: SourceCheckpoint, contract: Mapping[str, Any]) -> Finding:
    counts = contract["counts"]
    itemsize = getattr(torch, checkpoint.config["dtype"]).itemsize
    records = checkpoint.tensors.values()
    numbers = sum(stored_numbers(record.dtype, record.shape, itemsize) for record in records)
    stored = sum(math.prod(record.shape) * DTYPES[record.dtype].itemsize for record in records)
    pairs = {"parameters": numbers, "bytes": stored}
    faults = [
        f"{name}: counted {found:,}, compression.json says {counts[name]['compressed']:,}"
        for name, found in pairs.items()
        if found != counts[name]["compressed"]
    ]
    return Finding("counts", f"{numbers:,} numbers, {stored:,} bytes", tuple(faults))


def _coverage(original: SourceCheckpoint, checkpoint: SourceCheckpoint, contract: Mapping[str, Any]) -> Finding:
    """Each source tensor is copied bit for bit, or its module is stored by a named method."""
    faults = []
    claimed = contract.get("claimed", {})
    copied = 0
    for name, record in original.tensors.items():
        entry = contract["tensors"].get(name, {})
        if name in claimed:
            continue
        if entry.get("origin") != "copied" or name not in checkpoint.tensors:
            faults.append(f"{name}: neither copied nor claimed by a method")
            continue
        copied += 1
        found = checkpoint.tensors[name]
        pieces = zip(original.copy_bytes(name), checkpoint.copy_bytes(name), strict=False)
        if (record.dtype, record.shape) != (found.dtype, found.shape) or any(ours != theirs for ours, theirs in pieces):
            faults.append(f"{name}: said to be copied, but differs from the source")
    methods = ", ".join(sorted(set(claimed.values())))
    return Finding(
        "coverage",
        f"{copied} of {len(original.tensors)} source tensors copied, {len(claimed)} by {methods}",
        tuple(faults),
    )


def _logits(
    original: SourceCheckpoint,
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    contract: Mapping[str, Any],
    bound: float | None,
) -> Finding:
    """Relative error of the logits on fixed random tokens, streamed through both models in float32."""
    generator = torch.Generator().manual_seed(0)
    batch, length = SAMPLE_SHAPE
    length = min(length, config["max_position_embeddings"])
    ids_BS = torch.randint(0, config["vocab_size"], (batch, length), generator=generator)
    dense, packed = (
        stream_logits(source, described, ids_BS)
        for source, described in ((original, standard_config(original.config)), (checkpoint, config))
    )
    centred = dense - dense.mean(dim=0)
    error = ((packed - dense).square().sum() / centred.square().sum().clamp_min(1e-30)).sqrt().item()
    kept = contract["counts"]["parameters"]
    exact = kept["compressed"] >= kept["dense"]
    stated = bound if bound is not None else (EXACT_BOUND if exact else LOSSY_BOUND)
    faults = () if error <= stated else (f"relative error {error:.4g} of the logits is above {stated:g}",)
    return Finding("logits", f"relative error {error:.4g} on {ids_BS.numel()} tokens, bound {stated:g}", faults)


@torch.inference_mode()
def stream_logits(source: SourceCheckpoint, config: Mapping[str, Any], ids_BS: Tensor) -> Tensor:
    """Logits (B·S, V) in float32 of a dense or compressed checkpoint, one layer in memory at a time."""
    geometry = geometry_of(config)
    setup = Setup(
        source=source,
        config=config,
        geometry=geometry,
        run_dir=source.directory,
        tokens=None,
        shards=1,
        micro_batch=1,
        dtype=torch.float32,
        threads=torch.get_num_threads(),
        use_gpu=False,
        hidden_bytes=0,
    )
    layers = LayerReader(setup, torch.device("cpu"))
    hidden_BSD = embedding(layers)(ids_BS)
    for layer in range(geometry.num_layers):
        layers.read_ahead(layer + 1 if layer + 1 < geometry.num_layers else None)
        output_BSD = layers.block(layer, None).run(hidden_BSD)
        assert output_BSD is not None
        hidden_BSD = output_BSD
    return head(layers)(hidden_BSD.flatten(0, 1))
