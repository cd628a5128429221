"""What only a disk has stands in the disk's own files: another place for RUN_DIR is one more file like them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISK = {"disk.py", "durable.py", "node_cache.py"}
PRIMITIVES = re.compile(r"\bos\.(link|fsync|rename|replace|open)\b|\bfcntl\b|\bshutil\.rmtree\b|\bO_EXCL\b")
BY_PATH = {"hub.py", "hub_upload.py"}  # the folder of this machine that the hub's client reads and writes


def test_primitives_of_disks() -> None:
    found = {
        f"{path.name}:{number}"
        for path in (ROOT / "stores").glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIMITIVES.search(line) and path.name not in DISK
    }
    assert found == set()


def test_paths() -> None:
    using = {path.name for path in (ROOT / "stores").glob("*.py") if re.search(r"\bpathlib\b", path.read_text())}
    assert using - DISK == BY_PATH
