"""Damage to the files of a job: the ledger, everything else in RUN_DIR, the descriptions in OUTPUT.

Each function damages the folder of `World.fresh` as its `Random` says, and returns the commands to run there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tools.soak.input_cases import write_evil
from tools.soak.mutations import HOSTILE, mutate_bytes, mutate_json, mutate_tree, mutate_yaml
from tools.soak.world import RUN, STATUS, STOPS, VERIFY, VERIFY_SOURCE, Case, World, evaluate

ENTRY_NAMES = (
    "x.000001.json", "layer.00000.999999.json", "ranks.000002.json", "a.json", "layer..000001.json", "\n.000001.json",
)  # fmt: skip


def _ledger(world: World, rng: Random) -> Case:
    """Entries as bytes of any kind, or a changed record under a digest that fits."""
    stop = rng.choice(sorted(STOPS))
    entries = sorted((world.fresh(stop) / "run" / "ledger").iterdir())
    signed = rng.random() < 0.5
    path = rng.choice(entries)
    for each in dict.fromkeys([path, rng.choice(entries)] if rng.random() < 0.2 else [path]):
        if each.is_file():
            (_change_record if signed else _damage_entry)(each, entries, rng)
    commands = (RUN, RUN) if rng.random() < 0.8 else (STATUS,)
    whole = not any(entry.is_dir() or entry.is_symlink() for entry in entries)  # else the user must remove them
    return Case(f"{stop}: {path.name}{', signed' if signed else ''}", commands, stop, whole and not signed)


def _change_record(path: Path, _: list[Path], rng: Random) -> None:
    entry = json.loads(path.read_bytes())
    entry.pop("sha256")
    if rng.random() < 0.1:
        entry = mutate_tree(entry, rng)
    else:
        entry["record"] = mutate_tree(entry["record"], rng, HOSTILE)
    path.write_bytes(sign(entry))


def _damage_entry(path: Path, entries: list[Path], rng: Random) -> None:
    match rng.randrange(6):
        case 0:
            path.unlink()
        case 1:
            os.truncate(path, rng.randrange(path.stat().st_size))
        case 2:
            path.write_bytes(rng.choice(entries).read_bytes())
        case 3:
            path.rename(path.with_name(rng.choice(ENTRY_NAMES)))
        case 4:
            path.unlink()
            path.mkdir() if rng.random() < 0.5 else path.symlink_to(rng.choice(("/dev/zero", path.name, "..")))
        case _:
            path.write_bytes(mutate_json(path.read_bytes(), rng))


def sign(entry: Any) -> bytes:
    """Encode a ledger entry with a digest that fits; numbers that JSON lacks become null."""

    def plain(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")

    entry = json.loads(json.dumps(entry), parse_constant=lambda _: None)
    digest = hashlib.sha256(plain(entry)).hexdigest()
    return plain({**entry, "sha256": digest} if isinstance(entry, dict) else entry)


def _run_dir(world: World, rng: Random) -> Case:
    """Everything else in RUN_DIR."""
    stop = rng.choice(sorted(STOPS))
    run = world.fresh(stop) / "run"
    tops = [run / name for name in ("fingerprint.json", "lock.json", "manifest.yaml", "fingerprint.json", "lock.json")]
    stored = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "ledger" and path.parent != run]
    path = rng.choice(tops if rng.random() < 0.6 else stored)
    _damage_file(path, rng)
    if rng.random() < 0.1:
        path = rng.choice([folder for folder in run.iterdir() if folder.is_dir()])
        shutil.rmtree(path)
        if rng.random() < 0.5:
            path.write_text("a file")
        else:
            path.symlink_to(rng.choice(("/nowhere", "../tmp", "..")))
    commands = (RUN, RUN) if rng.random() < 0.6 else (STATUS,)
    link = path.is_symlink()
    whole = (path.is_file() and not link) or not os.path.lexists(path)  # anything else the user must remove
    repairable = whole and path.parent == run and path.suffix in (".json", ".yaml")
    return Case(f"{stop}: {path.relative_to(run)}", commands, stop, repairable=repairable, elsewhere=link)


def _damage_file(path: Path, rng: Random) -> None:
    data, exists = path.read_bytes() if path.exists() else b"{}", path.exists()
    kind = rng.randrange(8)
    if kind <= 1 and exists:
        path.unlink()
        if kind == 1:
            link = rng.choice(("/nowhere", path.name, "..", "/dev/null"))
            path.mkdir() if rng.random() < 0.4 else path.symlink_to(link)
    elif kind == 2 and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif path.suffix == ".yaml":
        path.write_bytes(mutate_yaml(data, rng))
    elif path.suffix == ".json" and kind < 7:
        path.write_bytes(mutate_json(data, rng))
    else:
        path.write_bytes(mutate_bytes(data, rng))


def _output(world: World, rng: Random) -> Case:
    """The record and the configs of a finished OUTPUT."""
    work = world.fresh("finished")
    names = ("compression.json", "compression.json", "config.json", "config.json", "generation_config.json")
    path = work / "output" / rng.choice(names)
    write_evil(path.parent, work / "pwned")
    if rng.random() < 0.15:
        content = json.loads(path.read_text())
        evil = {name: "evil.Config" for name in content.get("auto_map", {})}
        path.write_text(json.dumps({**content, "auto_map": evil}))
    elif rng.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    command = rng.choice((VERIFY, VERIFY_SOURCE, evaluate("output"), evaluate("output"), RUN, STATUS))
    return Case(path.name, (command,), "finished")


KINDS: dict[str, Callable[[World, Random], Case]] = {"ledger": _ledger, "run_dir": _run_dir, "output": _output}
