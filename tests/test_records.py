"""The typed entries of the ledger: what the stores and the workers write is what the types say."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from manifests.records import (
    ARRAY_DTYPES,
    TENSOR_DTYPES,
    ArrayRecord,
    CurvesEntry,
    DenseEntry,
    Key,
    LayerEntry,
    ShardRecord,
    StagedRecord,
    TokensEntry,
)
from pipeline.keys import COMPLETE, RANKS, dense_key, layer_key, rest_key, score_key
from stores.activations import ActivationStore
from stores.arrays import DTYPES as STORED_ARRAYS
from stores.checkpoint import describe_shard
from stores.headers import DTYPES as STORED_TENSORS
from stores.memory import Memory
from stores.staging import write_staged
from stores.statistics import StatisticsStore


def check(kind: Any, value: Any) -> None:
    """As JSON keeps it, the value is one of the type, and loses nothing."""
    stored = json.loads(json.dumps(value))
    assert TypeAdapter(kind).validate_python(stored) == stored


def test_dtypes_are_those_of_the_stores() -> None:
    assert tuple(STORED_ARRAYS) == ARRAY_DTYPES
    assert set(STORED_TENSORS) == set(TENSOR_DTYPES)


def test_what_the_stores_write(tmp_path: Path) -> None:
    store = ActivationStore(Memory())
    check(ArrayRecord, StatisticsStore(Memory()).write(3, "in", torch.ones(1, 4, 4, dtype=torch.float64)))
    check(ArrayRecord, store.write("dense", 1, 0, torch.ones(2, 3, 4)))
    check(TokensEntry, {"tokens": store.write_tokens(torch.ones(2, 3, dtype=torch.int32))})
    (tmp_path / "staged").mkdir()
    staged = write_staged(tmp_path, 0, {"a.weight": torch.ones(2, 2)})
    check(StagedRecord, staged)
    check(ShardRecord, describe_shard(tmp_path, staged["path"]))
    check(LayerEntry, {"staged": staged, "forms": {"q": {"form": "low_rank", "rank": 1}}, "groups": {}})


@pytest.fixture
def array() -> Any:
    return StatisticsStore(Memory()).write(3, "in", torch.ones(1, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../3"},
        {"shape": [1, 0, 4]},
        {"dtype": "float128"},
        {"chunks": [1, 4]},
        {"metadata_sha256": "ab"},
        {"version": "1"},
        {"checksums": None},
    ],
)
def test_what_makes_no_sense_is_no_entry(change: dict[str, Any], array: Any) -> None:
    entry = {"cosine": [[1.0, 2]], "statistics": {"in": array}}
    check(DenseEntry, entry)
    with pytest.raises(ValidationError, match=next(iter(change)) if "chunks" not in change else "chunk sizes"):
        check(DenseEntry, {**entry, "statistics": {"in": {**array, **change}}})


def test_columns_of_a_curve() -> None:
    curve = {"ranks": {"q": [1, 2]}, "numbers": [3.0, 4.0], "cache": [0.0, 0.0], "loss": [0.1, 0.0]}
    check(CurvesEntry, {"curves": {"0/0/q": curve}})
    for name in ("numbers", "cache", "loss"):
        with pytest.raises(ValidationError, match="columns of"):
            check(CurvesEntry, {"curves": {"0/0/q": {**curve, name: [0.0]}}})


def test_keys_are_names() -> None:
    keys = [dense_key(3), layer_key(12), rest_key("model-00002-of-00003"), score_key("dense", "ab"), RANKS, COMPLETE]
    assert keys == ["dense/00003", "layer/00012", "rest/model-00002-of-00003", "score/dense/ab", "ranks", "complete"]
    assert all(isinstance(key, Key) for key in keys)
    assert pickle.loads(pickle.dumps(keys)) == keys
