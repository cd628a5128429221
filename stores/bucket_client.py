"""Clients of a bucket: services, timeouts, retries and error texts.

Another service with conditional writes is one more line in `SERVICES`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

SERVICES = {"s3": S3Store}  # by the scheme of an address
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
RETRIES: RetryConfig = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=15), "base": 2},
}
FEW_RETRIES: RetryConfig = {**RETRIES, "max_retries": 3, "retry_timeout": timedelta(seconds=20)}
CUT_WAITS_S = (0.1, 1.0, 5.0, 10.0)  # before a truncated answer is requested again
PATIENT_TIMEOUT, HASTY_TIMEOUT = "120s", "10s"  # for one answer, which may be a large part
SHOWN_CHARACTERS = 300

T = TypeVar("T")


class Connection:
    """The clients of one bucket of a service."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self.service, self.bucket = SERVICES[scheme], bucket

    @cached_property
    def patient(self) -> S3Store:
        """A client that retries for minutes."""
        return self.service(self.bucket, client_options=_client_options(PATIENT_TIMEOUT), retry_config=RETRIES)

    @cached_property
    def hasty(self) -> S3Store:
        """A client that gives up early: for leases, and to probe whether the bucket answers."""
        return self.service(self.bucket, client_options=_client_options(HASTY_TIMEOUT), retry_config=FEW_RETRIES)


def _client_options(timeout: str) -> ClientConfig:
    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    return {"connect_timeout": "10s", "timeout": timeout, "allow_http": plain}


def repeated(ask: Callable[[], T]) -> T:
    """Repeat a request whose answer broke off in the middle; obstore itself repeats those without an answer."""
    for wait_s in CUT_WAITS_S:
        try:
            return ask()
        except BaseError as error:
            if "response body error" not in str(error):
                raise
            time.sleep(wait_s)
    return ask()


def server_reason(error: BaseException) -> str:
    """Describe a server's error without the parts that repeat the request: they may hold a key."""
    text = str(error).partition("\n\nDebug source")[0]
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if status is not None:
        parts = [status[1].strip(), *(part[1] for part in (code, message) if part)]
    else:
        parts = [text.rpartition(" - ")[2]]
    advice = "check network and endpoint, then run the same command again"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "403" in parts[0]:
        advice = "check the credentials and what they may do in the bucket"
    elif code is not None and code[1] == "NoSuchBucket":
        advice = "check the bucket's name"
    return f"{' '.join(': '.join(parts).split())[:SHOWN_CHARACTERS]}; {advice}"
