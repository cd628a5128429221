"""The data that a report reads from a run directory."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from manifests.entries import DenseEntry, StatisticsEntry
from manifests.records import ArrayRecord, CountedRecord, Curve
from pipeline.methods.registry import build_methods
from pipeline.reporting import run_data
from pipeline.reporting.run_data import LOG_LINES, UNIT_FIELDS
from stores.json_files import read_object
from tests.memory_storage import Memory
from tests.reporting.runs import run_of

ALIVE, DEAD = {"alive": True}, {"alive": False}


@pytest.mark.parametrize(
    ("owner", "ended", "complete", "state"),
    [
        (ALIVE, None, None, "running"),
        (ALIVE, {"outcome": "failed"}, object(), "running"),
        (DEAD, {"outcome": "interrupted"}, None, "interrupted"),
        (None, {"outcome": "failed"}, object(), "failed"),
        (DEAD, None, object(), "done"),
        (DEAD, None, None, "stopped"),
        (None, None, None, "stopped"),
    ],
)
def test_the_state_of_a_run(owner: Any, ended: Any, complete: Any, state: str) -> None:
    assert run_data._state(owner, ended, complete) == state


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{", b"\xff{}", b"null"])
def test_a_missing_or_damaged_file_is_no_object(content: bytes | None) -> None:
    storage = Memory()
    if content is not None:
        storage.write("a.json", content)
    assert read_object(storage, "a.json") is None


def test_an_object_is_read() -> None:
    storage = Memory()
    storage.write("a.json", b'{"run": 1}')
    assert read_object(storage, "a.json") == {"run": 1}


def test_a_commit_has_the_time_of_its_latest_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "layer.00003.000001.json": 5.0, "layer.00003.000002.json": 9.0, "dense.00000.000001.json": 7.0,
        "layer.00001.000001.json": 1.0, "ranks.000001.json": 7.0,
    }  # fmt: skip
    storage: Any = SimpleNamespace(modified_times=lambda: times)
    keys = ("dense/00000", "layer/00003", "ranks", "complete")  # layer/00001 was retracted, complete is just being read
    assert run_data._commits(storage, keys) == ((7.0, "dense/00000"), (7.0, "ranks"), (9.0, "layer/00003"))


def test_the_last_unit_log_without_lines_that_a_kill_has_cut_off() -> None:
    logs, unit = Memory(), dict.fromkeys(UNIT_FIELDS, 1)
    logs.write("20260101-1.units.jsonl", json.dumps({**unit, "unit": "old"}).encode())
    assert [each["unit"] for each in run_data._units(logs)] == ["old"]
    lines = [
        json.dumps(unit),
        "[1]",
        "3",
        "",
        '{"unit": 1}',
        json.dumps({**unit, "unit": "last"}),
        json.dumps(unit)[:-4],
    ]
    logs.write("20260102-1.units.jsonl", "\n".join(lines).encode() + b"\xff")
    logs.write("20260103-1.log", b"not a unit")
    assert [each["unit"] for each in run_data._units(logs)] == [1, "last"]
    assert run_data._units(Memory()) == ()


def test_the_log_has_its_last_lines_and_earlier_warnings() -> None:
    logs = Memory()
    assert run_data._log(logs) == ()
    lines = ["a WARNING early", "dropped", "an ERROR early", *(f"line {number}" for number in range(LOG_LINES))]
    logs.write("1.log", "\n".join(lines).encode())
    assert run_data._log(logs) == ("a WARNING early", "an ERROR early", *lines[3:])
    logs.write("1.log", b"a WARNING of few lines")
    assert run_data._log(logs) == ("a WARNING of few lines",)  # once


def array(*shape: int, kind: type[ArrayRecord] = ArrayRecord, **fields: Any) -> ArrayRecord:
    return kind(
        version=1, path="moments/" + 32 * "0", shape=shape, dtype="float64", chunks=shape, symmetric=False,
        metadata_sha256="0" * 64, checksums=(), **fields,
    )  # fmt: skip


def test_bytes_of_moments_by_layer() -> None:
    entries = {
        "dense/00001": DenseEntry(cosine=(), statistics={"a": array(1, 3, 3), "b": array(2, 5)}),
        "statistics/00001": StatisticsEntry(statistics={"c": array(4, kind=CountedRecord, tokens=7)}),
        "dense/00002": DenseEntry(cosine=(), statistics={}),
        "layer/00001": object(),
    }
    assert run_data._statistics_bytes(entries) == {1: 8 * (9 + 10 + 4)}


def test_stored_bytes_go_to_the_longest_path_that_fits() -> None:
    def tensor(*shape: int) -> Any:
        return SimpleNamespace(shape=shape, dtype="F32")

    names = {
        "model.layers.1.self_attn.v_proj.weight": tensor(2, 3),
        "model.layers.1.self_attn_norm.weight": tensor(5),  # no module of a task
        "model.layers.1.mlp.gate_proj.weight": tensor(4, 2),
        "model.layers.1.mlp.down_proj.weight": tensor(2, 4),
        "model.layers.1.input_layernorm.weight": tensor(3),
    }
    run = run_of(layers={1: SimpleNamespace(staged=SimpleNamespace(tensors=names))})
    groups = {role: task.name for task in run.tasks if task.layer == 1 for role in task.roles}
    stored = run.stored_bytes(1)
    assert stored == {groups["v"]: 24, groups["gate"]: 64, "rest": 32}


def test_full_ranks_of_ranges_and_of_curves() -> None:
    curve = Curve(ranks={"rank": (3, 99, 5)}, numbers=(1, 2, 3), cache=(0, 0, 0), loss=(0.0, 0.0, 0.0))
    run = run_of(curves={"1/0/mlp": curve})
    variables = [each for method in build_methods(run.manifest) for each in method.rank_variables(run.geometry)]
    assert run.caps[("1/0/mlp", "rank")] == 99
    assert len(run.caps) == len(variables) + 1
    assert all(run.caps[(f"{v.layer}/0/{v.group}", v.name)] == v.cap > 0 for v in variables)
