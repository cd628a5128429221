"""Files that run in one process."""

from __future__ import annotations

from pathlib import Path

from tests.processes import ON_ONE_RAY, scope_of

ROOT = Path(__file__).resolve().parents[1]


def test_files_on_one_ray_are_one_scope_and_others_are_their_own() -> None:
    assert {scope_of(file) for file in ON_ONE_RAY} == {"one Ray"}
    assert scope_of("tests/end_to_end/test_sweep.py") == "tests/end_to_end/test_sweep.py"
    assert all("shared_ray" in (ROOT / file).read_text() for file in ON_ONE_RAY), "one needs it no more"
