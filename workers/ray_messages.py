"""Passes what Ray reports of its nodes to a logger: the last lines of a raylet that died would flood a terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

RAY_LOG = logging.getLogger("lamina.ray")  # `pipeline.console.log_files` gives it a file; else it writes to stderr


def log_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Logs one message. Takes the place of what prints them on a driver's terminal, and is called as that is."""
    prefix = "" if ignore_prefix else f"({data.get('pid')}) "
    RAY_LOG.warning("%s%s", prefix, "\n".join(data["lines"]))
