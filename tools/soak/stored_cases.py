"""Cases of what a job has written: ledger, everything else in RUN_DIR, OUTPUT's descriptions.

Each function damages something in the folder of `World.fresh`, as its `Random` says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from random import Random
from typing import Any

from tools.soak.case import RUN, STATUS, VERIFY, VERIFY_SOURCE, Case, evaluate, write_evil
from tools.soak.mutations import HOSTILE, mutate_bytes, mutate_json, mutate_tree, mutate_yaml
from tools.soak.world import HALVES, World


def ledger_case(world: World, rng: Random) -> Case:
    """Ledger entries: bytes of any kind, or a changed record under a digest that is right."""
    half = rng.choice(sorted(HALVES))
    work = world.fresh(half)
    entries = sorted((work / "run" / "ledger").iterdir())
    signed = rng.random() < 0.5
    path = rng.choice(entries)
    others = dict.fromkeys([path, rng.choice(entries)] if rng.random() < 0.2 else [path])
    for path in others:
        if not path.is_file():
            continue
        if signed:
            entry = json.loads(path.read_bytes())
            entry.pop("sha256")
            if rng.random() < 0.1:
                entry = mutate_tree(entry, rng)
            else:
                entry["record"] = mutate_tree(entry["record"], rng, HOSTILE)
            path.write_bytes(sign(entry))
        else:
            match rng.randrange(6):
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, rng.randrange(path.stat().st_size))
                case 2:
                    path.write_bytes(rng.choice(entries).read_bytes())
                case 3:
                    path.rename(path.with_name(rng.choice(("x.000001.json", "layer.00000.999999.json",
                    "ranks.000002.json",
                                                           "a.json", "layer..000001.json",
                                                           "\n.000001.json"))))  # fmt: skip
                case 4:
                    path.unlink()
                    path.mkdir() if rng.random() < 0.5 else path.symlink_to(rng.choice(("/dev/zero", path.name, "..")))
                case _:
                    path.write_bytes(mutate_json(path.read_bytes(), rng))
    commands = (RUN, RUN) if rng.random() < 0.8 else (STATUS,)
    whole = not any(path.is_dir() or path.is_symlink() for path in entries)  # else for the user to remove
    return Case(f"{half}: {path.name}{', signed' if signed else ''}", commands, half, whole and not signed)


def sign(entry: Any) -> bytes:
    """A ledger entry with the digest that it should have; what is no JSON there becomes null."""

    def plain(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")

    entry = json.loads(json.dumps(entry), parse_constant=lambda _: None)
    digest = hashlib.sha256(plain(entry)).hexdigest()
    return plain({**entry, "sha256": digest} if isinstance(entry, dict) else entry)


def run_dir_case(world: World, rng: Random) -> Case:
    """Everything else in RUN_DIR."""
    half = rng.choice(sorted(HALVES))
    work = world.fresh(half)
    run = work / "run"
    tops = [run / name for name in ("fingerprint.json", "lock.json", "manifest.yaml", "fingerprint.json", "lock.json")]
    stored = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "ledger" and path.parent != run]
    path = rng.choice(tops if rng.random() < 0.6 else stored)
    data = path.read_bytes() if path.exists() else b"{}"
    kind = rng.randrange(8)
    if kind == 0 and path.exists():
        path.unlink()
    elif kind == 1 and path.exists():
        path.unlink()
        path.mkdir() if rng.random() < 0.4 else path.symlink_to(rng.choice(("/nowhere", path.name, "..", "/dev/null")))
    elif kind == 2 and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif path.suffix == ".yaml":
        path.write_bytes(mutate_yaml(data, rng))
    elif path.suffix == ".json" and kind < 7:
        path.write_bytes(mutate_json(data, rng))
    else:
        path.write_bytes(mutate_bytes(data, rng))
    if rng.random() < 0.1:
        folder = rng.choice([folder for folder in run.iterdir() if folder.is_dir()])
        shutil.rmtree(folder)
        folder.write_text("a file") if rng.random() < 0.5 else folder.symlink_to(
            rng.choice(("/nowhere", "../tmp", ".."))
        )
        path = folder
    commands = (RUN, RUN) if rng.random() < 0.6 else (STATUS,)
    link = path.is_symlink()
    whole = (path.is_file() and not link) or not os.path.lexists(path)  # what else is there, the user must remove
    what = f"{half}: {path.relative_to(run)}"
    repairable = whole and path.parent == run and path.suffix in (".json", ".yaml")
    return Case(what, commands, half, repairable=repairable, elsewhere=link)


def output_case(world: World, rng: Random) -> Case:
    """compression.json and config.json of a finished OUTPUT."""
    work = world.fresh("finished")
    path = (
        work
        / "output"
        / rng.choice(("compression.json", "compression.json", "config.json", "config.json", "generation_config.json"))
    )
    write_evil(work / "output" / "evil.py", work / "pwned")
    if rng.random() < 0.15:
        content = json.loads(path.read_text())
        path.write_text(
            json.dumps({**content, "auto_map": {name: "evil.Config" for name in content.get("auto_map", {})}})
        )
    elif rng.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    command = rng.choice((VERIFY, VERIFY_SOURCE, evaluate("output"), evaluate("output"), RUN, STATUS))
    return Case(path.name, (command,), "finished")
