"""The typed entries of the ledger: records of the stores and the workers have the declared types."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from manifests.entries import (
    AssemblingEntry,
    CompleteEntry,
    CurvesEntry,
    DenseEntry,
    GroupReport,
    LayerEntry,
    TaskScores,
    TokensEntry,
)
from manifests.records import (
    ARRAY_DTYPES,
    TENSOR_DTYPES,
    ArrayRecord,
    Curve,
    FormSpec,
    LedgerKey,
    Record,
    Scheme,
    ShardRecord,
    StagedLayer,
    StagedRecord,
)
from pipeline.driver.ledger_keys import COMPLETE, RANKS, dense_key, layer_key, rest_key, score_key
from stores.activations import ActivationStore
from stores.arrays import DTYPES as STORED_ARRAYS
from stores.checkpoint import describe_shard
from stores.headers import DTYPES as STORED_TENSORS
from stores.staging import write_staged
from stores.statistics import StatisticsStore
from tests.memory_storage import Memory


def check(kind: type[Record], stored: Any) -> Record:
    """Check that stored JSON makes a record of the kind, which gives the same JSON again and is frozen."""
    stored = json.loads(json.dumps(stored, default=Record.as_json))
    record = kind.model_validate(stored)
    assert json.loads(json.dumps(record.as_json())) == stored
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, next(iter(kind.model_fields)), None)
    return record


def test_dtypes_are_those_of_the_stores() -> None:
    assert tuple(STORED_ARRAYS) == ARRAY_DTYPES
    assert set(STORED_TENSORS) == set(TENSOR_DTYPES)


def test_what_the_stores_write(tmp_path: Path) -> None:
    store = ActivationStore(Memory())
    check(ArrayRecord, StatisticsStore(Memory()).write(3, "in", torch.ones(1, 4, 4, dtype=torch.float64)))
    check(ArrayRecord, store.write("dense", 1, 0, torch.ones(2, 3, 4)))
    check(TokensEntry, TokensEntry(tokens=store.write_tokens(torch.ones(2, 3, dtype=torch.int32))))
    (tmp_path / "staged").mkdir()
    staged = write_staged(tmp_path, 0, {"a.weight": torch.ones(2, 2)})
    check(StagedRecord, staged)
    check(ShardRecord, describe_shard(tmp_path, staged.path))
    check(LayerEntry, {"staged": staged, "forms": {"q": {"form": "low_rank", "rank": 1}}, "groups": {}})


def test_nothing_is_added_and_nothing_is_lost() -> None:
    """What was not said is not stored, null is stored, numbers stay as they are, and so does what nobody knows here."""
    form = {"form": "tucker", "ranks": [2, 3, 4], "nnz_qo": 5}
    assert check(FormSpec, form).rank is None
    check(FormSpec, {"form": "latent", "rank": 3, "absorbed": False})
    check(Scheme, {"bits": 4, "group": None})
    check(GroupReport, {"ranks": {"value": 3}, "method": 0, "clipped": 2, "energies": [0.5, 1]})
    check(Curve, {"ranks": {"q": [1]}, "numbers": [3], "cache": [0], "loss": [0.0], "told": "01", "from": "later"})
    check(AssemblingEntry, {"output": "/out", "files": []})
    check(TaskScores, {"metrics": {"acc": {"value": 0.5, "stderr": None}}, "documents": 3})
    assert CompleteEntry(output="/out", contract_sha256="0" * 64, summary={"a": (1, None)}).as_json()["summary"] == {
        "a": [1, None]
    }


def test_a_staged_layer_is_stored_as_its_file() -> None:
    """The driver hands on what a worker needs of a layer; the entry says forms once."""
    file = {"path": f"staged/layer-00001.{'0' * 32}.safetensors", "size": 1, "sha256": "0" * 64, "tensors": {}}
    layer = StagedLayer(**file, forms={"q": FormSpec(form="pruned", rank=2)})
    entry = LayerEntry(staged=layer, forms=layer.forms, groups={})
    assert entry.as_json()["staged"] == file


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
    entry = {"cosine": [[1.0, 2]], "statistics": {"in": array.as_json()}}
    check(DenseEntry, entry)
    with pytest.raises(ValidationError, match=next(iter(change)) if "chunks" not in change else "chunk sizes"):
        check(DenseEntry, {**entry, "statistics": {"in": {**array.as_json(), **change}}})


def test_columns_of_a_curve() -> None:
    curve = {"ranks": {"q": [1, 2]}, "numbers": [3.0, 4.0], "cache": [0.0, 0.0], "loss": [0.1, 0.0]}
    check(CurvesEntry, {"curves": {"0/0/q": curve}})
    for name in ("numbers", "cache", "loss"):
        with pytest.raises(ValidationError, match="columns of"):
            check(CurvesEntry, {"curves": {"0/0/q": {**curve, name: [0.0]}}})


def test_keys_are_names() -> None:
    keys = [dense_key(3), layer_key(12), rest_key("model-00002-of-00003"), score_key("dense", "ab"), RANKS, COMPLETE]
    assert keys == ["dense/00003", "layer/00012", "rest/model-00002-of-00003", "score/dense/ab", "ranks", "complete"]
    assert all(isinstance(key, LedgerKey) for key in keys)
    assert pickle.loads(pickle.dumps(keys)) == keys
