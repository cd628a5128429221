"""Commands in output are spelled as the process was called."""

from __future__ import annotations

import io
import sys

import pytest

from pipeline.console.arguments import parser
from pipeline.console.calling import as_called
from pipeline.console.progress import JobObserver
from pipeline.console.wrapping import say

TEXT = "run it with: python -m pipeline.run job.yaml, `python -m pipeline.verify` after it"
CALLS = {
    "/env/pipeline/init.py": TEXT,
    "python -m pipeline.init": TEXT,
    "/env/bin/pytest": TEXT,
    "lamina init": "run it with: lamina run job.yaml, `lamina verify` after it",
}


@pytest.mark.parametrize("call", CALLS)
def test_output_spells_commands_as_the_call_did(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [call, "job.yaml"])
    assert as_called(TEXT) == CALLS[call]
    printed = io.StringIO()
    say(TEXT, printed)
    JobObserver(printed).say(TEXT)
    assert printed.getvalue().splitlines() == [CALLS[call]] * 2
    assert parser("plan", "…").prog == ("lamina plan" if call == "lamina init" else "python -m pipeline.plan")
