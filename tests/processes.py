"""Groups tests by process of xdist: the tests of a file, and those of all files that share one Ray."""

from __future__ import annotations

from typing import Any

import pytest

# Files of tests on one local Ray (tests/end_to_end/shared_ray.py): in each process its servers and workers take half a
# minute of a core to start and to import torch.
ON_ONE_RAY = frozenset(
    f"tests/end_to_end/test_{name}.py"
    for name in ("evaluate", "interruption", "job", "job_variants", "loopback", "wrong_input")
)


def scope_of(file: str) -> str:
    """Return the name of the group of tests that a file belongs to. A group runs in one process, in order."""
    return "one Ray" if file in ON_ONE_RAY else file


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return xdist's scheduler of whole files, by `scope_of`."""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return ByScope(config, log)
