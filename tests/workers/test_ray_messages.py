"""Ray's reports of its nodes go to a file of the run, not to the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.console.log_files import close_log, open_log
from workers.cluster import log_message

DUMP = {"lines": ["raylet died; its last lines:", "[state-dump] a", "[state-dump] b"], "pid": "raylet", "is_err": False}


def test_a_dump_goes_to_a_file_beside_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Path(open_log(tmp_path, "run", dict))
    beside = log.with_suffix(".ray.txt")
    assert not beside.exists(), "most runs have none"
    log_message(DUMP, False)
    close_log()
    assert "(raylet) raylet died; its last lines:\n[state-dump] a\n[state-dump] b\n" in beside.read_text()
    assert str(beside) in log.read_text()
    assert "state-dump" not in log.read_text()
    assert capfd.readouterr() == ("", "")
