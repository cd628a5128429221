"""The ledger: one immutable entry per commit, the highest valid generation counts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.entries import MeasuredEntry, RanksEntry
from manifests.errors import InputError, StorageError
from pipeline.driver.ledger_keys import RANKS, measured_key
from stores.disk import Disk
from stores.durable import partial_path
from stores.ledger import Ledger, LedgerView
from tests.failing_disk import no_hard_links

KilledAnywhere = Callable[..., int]


def test_commit_get_keys(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.get("unit/00003") is None
    assert ledger.keys() == []
    record = {"shape": [1, 2], "digest": "ab", "nested": {"x": None, "y": 0.1}}
    ledger.commit("unit/00003", record)
    ledger.commit("unit/00002", {})
    ledger.commit("arrays/first/00002", {"a": 1})
    assert ledger.get("unit/00003") == record
    assert ledger.get("unit/00002") == {}
    assert ledger.keys("unit/") == ["unit/00002", "unit/00003"]
    again = Ledger(tmp_path / "ledger")
    assert again.keys() == ["arrays/first/00002", "unit/00002", "unit/00003"]
    assert [*again.get("unit/00003")] == [*record], "fields keep their order, of which a summary is printed"


def test_parts_of_a_ledger(tmp_path: Path) -> None:
    """Each has its own entries, sees what all share, and shares some with those of the same place."""
    whole = Ledger(tmp_path)
    one, two = (LedgerView(whole, f"point/{name}", {"passes": "", "lines": "methods/m"}) for name in ("a", "b"))
    one.commit("unit/00001", {"of": "one"})
    two.commit("unit/00001", {"of": "two"})
    one.commit("passes/00000", {"of": "all"})
    one.commit("lines/00000", {"of": "both"})
    assert one.get("unit/00001") == {"of": "one"}
    assert two.get("unit/00001") == {"of": "two"}
    assert two.get("passes/00000") == whole.get("passes/00000") == {"of": "all"}
    assert two.get("lines/00000") == {"of": "both"}
    assert one.keys() == one.keys("unit/") == ["unit/00001"]
    assert one.keys("passes/") == []
    assert "point/a/unit/00001" in whole.keys()  # noqa: SIM118 - no mapping
    one.retract("unit/00001")
    assert (one.get("unit/00001"), two.get("unit/00001")) == (None, {"of": "two"})
    one.sweep()
    two.clear()
    assert whole.keys() == ["methods/m/lines/00000", "passes/00000"]


def test_a_key_does_not_see_another_that_it_begins(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.commit("unit", {"a": 1})
    ledger.commit("unit/000001", {"b": 1})
    assert ledger.get("unit") == {"a": 1}
    ledger.commit("unit", {"a": 2})
    assert ledger.get("unit/000001") == {"b": 1}


def test_the_newest_commit_counts_and_the_old_goes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(3):
        ledger.commit("unit/0", {"number": number})
    assert ledger.get("unit/0") == {"number": 2}
    assert os.listdir(tmp_path) == ["unit.0.000003.json"]


def test_retract_and_commit_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.retract("unit/0")
    assert os.listdir(tmp_path) == []
    ledger.commit("unit/0", {"a": 1})
    ledger.retract("unit/0")
    assert ledger.get("unit/0") is None
    assert ledger.keys() == []
    ledger.commit("unit/0", {"a": 2})
    assert ledger.get("unit/0") == {"a": 2}


def test_sweep_keeps_the_state(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.commit("a", {"n": 1})
    old = (tmp_path / "a.000001.json").read_bytes()
    ledger.commit("a", {"n": 2})
    (tmp_path / "a.000001.json").write_bytes(old)  # killed before the old one was dropped
    ledger.commit("b", {})
    ledger.retract("b")
    partial_path(tmp_path / "a.000003.json").write_bytes(b"{")
    ledger.sweep()
    assert os.listdir(tmp_path) == ["a.000002.json"]
    assert ledger.get("a") == {"n": 2}


def test_damaged_entries_are_ignored_and_said(
    tmp_path: Path, damage: Callable[[Path], object], said: list[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.commit("unit/0", {"digest": "0123456789"})
    path = tmp_path / "unit.0.000001.json"
    damage(path)
    ledger = Ledger(tmp_path)
    assert ledger.get("unit/0") is None
    assert ledger.keys() == []
    assert not path.exists() or str(path) in "\n".join(said)
    ledger.sweep()
    ledger.commit("unit/0", {"digest": "new"})
    assert ledger.get("unit/0") == {"digest": "new"}


def test_an_entry_under_the_name_of_another_is_damaged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.commit("unit/0", {"a": 1})
    (tmp_path / "unit.1.000001.json").write_bytes((tmp_path / "unit.0.000001.json").read_bytes())
    (tmp_path / "unit.0.000009.json").write_bytes((tmp_path / "unit.0.000001.json").read_bytes())
    assert ledger.get("unit/1") is None
    assert ledger.get("unit/0") == {"a": 1}


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    entry = {"version": 2, "key": "a", "generation": 1, "record": {}}
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "a.000001.json").write_text(json.dumps({**entry, "sha256": digest}))
    with pytest.raises(InputError, match="version 2") as caught:
        Ledger(tmp_path).get("a")
    assert "a.000001.json" in str(caught.value)


def test_an_entry_of_its_kind_is_read_as_its_class(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    entry = RanksEntry(ranks={"0/0/mlp": {"width": 8}}, importance={})
    ledger.commit(RANKS, entry)
    assert ledger.get(RANKS) == entry
    kept = json.loads((tmp_path / "ranks.000001.json").read_text())["record"]
    assert kept == {"ranks": {"0/0/mlp": {"width": 8}}, "importance": {}}


def test_an_entry_that_makes_no_sense_is_damaged(tmp_path: Path, said: list[str]) -> None:
    """Though it is as it was written: it is ignored, told, and may be written again."""
    ledger = Ledger(tmp_path)
    ledger.commit("ranks", {"ranks": {"0/0/mlp": {"width": -8}}, "importance": {}})
    assert ledger.get(RANKS) is None
    assert ledger.keys() == []
    assert "invalid record: ranks.0/0/mlp.width: Input should be greater than 0" in "\n".join(said)
    ledger.commit(RANKS, RanksEntry(ranks={}, importance={}))
    assert ledger.keys() == ["ranks"]


def test_what_json_cannot_say_is_not_entered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        Ledger(tmp_path).commit(measured_key(0), MeasuredEntry(measured={"a": float("nan")}))
    with pytest.raises(ValueError, match="Unable to serialize unknown type"):
        Ledger(tmp_path).commit(measured_key(0), MeasuredEntry(measured={"a": object()}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a.b", "../a", "a b", "a\n"])
def test_bad_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="ledger key"):
        Ledger(tmp_path).commit(key, {})


def test_a_full_disk_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.commit("a", {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="full"):
            ledger.commit("a", {"n": 2})
    assert ledger.get("a") == {"n": 1}


def test_a_reader_survives_a_commit_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(tmp_path).commit("a", {"n": 1})
    real = Disk.read
    raced: list[str] = []

    def read(self: Disk, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if not raced:
            raced.append(name)
            Ledger(tmp_path).commit("a", {"n": 2})
        return real(self, name, begin, end)

    monkeypatch.setattr(Disk, "read", read)
    assert Ledger(tmp_path).get("a") == {"n": 2}


@pytest.mark.parametrize("links", [True, False])
def test_killed_anywhere_a_commit_is_old_or_new(
    links: bool, killed_anywhere: KilledAnywhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(directory: Path) -> None:
        ledger = Ledger(directory / "ledger")
        ledger.commit("a", {"n": 1})
        ledger.commit("a", {"n": 2})
        ledger.retract("a")
        ledger.sweep()

    seen = []

    def check(directory: Path) -> None:
        ledger = Ledger(directory / "ledger")
        seen.append((ledger.get("a") or {}).get("n"))
        ledger.sweep()
        assert (ledger.get("a") or {}).get("n") == seen[-1]
        ledger.commit("a", {"n": 9})
        assert ledger.get("a") == {"n": 9}

    if not links:
        monkeypatch.setattr(os, "link", no_hard_links)
    killed_anywhere(act, check)
    order = [0 if n is None else n for n in seen]
    retracted = order.index(2) + order[order.index(2) :].index(0)
    assert order[:retracted] == sorted(order[:retracted])
    assert set(order[:retracted]) == {0, 1, 2}
    assert set(order[retracted:]) == {0}
