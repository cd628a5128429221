"""Sends Ray's reports about its nodes to a logger, because the last lines of a dead raylet would flood a terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

RAY_LOG = logging.getLogger("lamina.ray")  # `pipeline.console.log_files` adds a file; otherwise it writes to stderr


def log_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Log one message. Replaces the function by which Ray prints messages on a driver's terminal."""
    prefix = "" if ignore_prefix else f"({data.get('pid')}) "
    RAY_LOG.warning("%s%s", prefix, "\n".join(data["lines"]))
