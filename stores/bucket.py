"""Storage in a bucket: S3, or what speaks its protocol. See `stores.backend.Storage`; docs/formats.md#buckets.

An object appears whole when its last request is answered, and is durable then. Created once is a PUT with
`If-None-Match`; held is a lease that its owner renews with `If-Match`. Each object carries the token of the write that
made it: who never heard the answer to a request finds out whether it was done.

Credentials, region and endpoint are found as AWS's tools find them: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, web identity, the container's or the instance's role. No message
shows them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from manifests.errors import InputError, StorageError
from stores import lease
from stores.backend import Readable, Storage, Writable
from stores.lease import Lease, is_gone, take_lease

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[^/?#]+)*)/?")
TOKEN = "lamina-write"
PART_BYTES = 16 * 1024 * 1024  # of at most 10,000 in an object
RANGE_BYTES = 16 * 1024 * 1024
PARALLEL = 4
COPY_BYTES = 5 * 1000**3  # what one request may copy
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
RETRIES: RetryConfig = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=15), "base": 2},
}
FEW_RETRIES: RetryConfig = {**RETRIES, "max_retries": 3, "retry_timeout": timedelta(seconds=20)}
CUT_WAITS_S = (0.1, 1.0, 5.0, 10.0)  # before an answer that broke off is asked for again
SHOWN_CHARACTERS = 300

T = TypeVar("T")


class _Connection:
    """The clients of one bucket."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    @cached_property
    def patient(self) -> S3Store:
        """Tries for minutes."""
        return S3Store(self.bucket, client_options=_client_options("120s"), retry_config=RETRIES)

    @cached_property
    def hasty(self) -> S3Store:
        """For leases, and to see whether a bucket answers at all."""
        return S3Store(self.bucket, client_options=_client_options("10s"), retry_config=FEW_RETRIES)


def _client_options(timeout: str) -> ClientConfig:
    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    return {"connect_timeout": "10s", "timeout": timeout, "allow_http": plain}


class Bucket(Storage):
    """The objects of a bucket below a prefix, by the address `s3://bucket/prefix`."""

    def __init__(self, address: str, connection: _Connection | None = None) -> None:
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise InputError(f"{address}: no address of a bucket; expected s3://BUCKET or s3://BUCKET/FOLDER")
        self.bucket = found["bucket"]
        self.prefix = found["prefix"].lstrip("/")
        self._connection = connection or _Connection(self.bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.at(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bucket) and other.at() == self.at()

    def __hash__(self) -> int:
        return hash(self.at())

    def put_if_absent(self, name: str, data: bytes) -> None:
        try:
            self._put(name, data, mode="create")
        except AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, "already there", self.at(name)) from None

    def replace(self, name: str, data: Any) -> None:
        self._put(name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[Writable]:
        token = uuid.uuid4().hex
        with self._errors("writing", name):
            upload = obstore.open_writer(
                self._connection.patient,
                self._key(name),
                attributes={TOKEN: token},
                buffer_size=PART_BYTES,
                max_concurrency=PARALLEL,
            )
        yield _Upload(self, name, upload)  # left by an exception, it is never completed, and no object
        with self._errors("writing", name):
            try:
                upload.close()
            except (BaseError, OSError):
                if not self._was_written(name, token):
                    raise

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is not None and (begin < 0 or end <= begin):
            size = self.size(name)
            begin = max(0, size + begin) if begin < 0 else begin
            if min(end, size) <= begin:
                return b""
        wanted: Any = {"suffix": -begin} if begin < 0 else (begin, end) if end is not None else {"offset": begin}
        with self._errors("reading", name):
            try:
                return self._get(name, wanted if wanted != {"offset": 0} else None)
            except BaseError:
                if self.size(name) <= max(0, begin):  # of nothing there is no range
                    return b""
                raise

    @contextmanager
    def reader(self, name: str) -> Iterator[Readable]:
        try:
            yield _Object(self, name, self._head(name))
        except FileNotFoundError as error:
            raise StorageError(f"reading {self.at(name)}: no such object; check the address") from error

    def stamp(self, name: str) -> dict[str, int | str]:
        head = self._head(name)
        return {"size": head["size"], "e_tag": str(head["e_tag"]), "modified": head["last_modified"].isoformat()}

    def written(self, folder: str = "") -> dict[str, float]:
        def ask() -> list[Any]:
            return [
                head for batch in obstore.list(self._connection.patient, self._key(folder) or None) for head in batch
            ]

        with self._errors("listing", folder):
            found = {self._name(head["path"]): head["last_modified"].timestamp() for head in _repeated(ask)}
        return dict(sorted(found.items()))

    def folders(self, folder: str = "") -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self._directly(folder)["common_prefixes"])

    def files(self, folder: str = "") -> list[str]:
        return sorted(head["path"].rpartition("/")[2] for head in self._directly(folder)["objects"])

    def children(self, folder: str = "") -> list[str]:
        return sorted({*self.folders(folder), *self.files(folder)})

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        with self._errors("removing from", ""):
            if keys:
                obstore.delete(self._connection.patient, keys)

    def take(self, name: str, source: Storage, source_name: str) -> None:
        within = isinstance(source, Bucket) and source.bucket == self.bucket
        if isinstance(source, Bucket) and within and source.size(source_name) <= COPY_BYTES:
            with self._errors("copying", name):
                obstore.copy(self._connection.patient, source._key(source_name), self._key(name))
        else:
            super().take(name, source, source_name)

    def prepare(self, folders: Iterable[str] = ()) -> None:
        """Besides, makes sure that the bucket keeps conditions, on which commits and locks stand."""
        probe = f".lamina.probe-{uuid.uuid4().hex}"
        self.put_if_absent(probe, b"probe")
        kept = []
        for mode in ("create", {"e_tag": '"another"'}):
            try:
                self._put(probe, b"again", mode=mode)
            except (AlreadyExistsError, PreconditionError):
                kept.append(mode)
        self.delete([probe])
        if len(kept) < 2:
            raise StorageError(
                f"{self.at()}: this bucket does not keep the conditions If-None-Match and If-Match of a PUT, without "
                "which two jobs could take each other's place; use one that does"
            )

    def fault(self) -> str | None:
        try:
            next(iter(obstore.list(self._connection.hasty, self._key("") or None)), None)
        except (BaseError, OSError) as error:
            return f"not to be listed: {_reason(error)}"
        return None

    def hold(self, name: str) -> Lease:
        return take_lease(self, name)

    def is_held(self, name: str) -> bool:
        found = self.read_lease(name)
        if found is None or found[0].get("released") or is_gone(found[0]):
            return False
        return time.time() - float(self._head(name)["last_modified"].timestamp()) < lease.LEASE_S

    def below(self, folder: str) -> Bucket:
        return Bucket(self.at(folder), self._connection)

    def at(self, name: str = "") -> str:
        return "s3://" + "/".join(filter(None, (self.bucket, self.prefix, name)))

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.prefix, name)))

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.prefix}/") if self.prefix else key

    def _put(self, name: str, data: Any, mode: Any = "overwrite", hasty: bool = False) -> str:
        """The entity tag of what was written. Raises AlreadyExistsError and PreconditionError as `mode` has it."""
        token = uuid.uuid4().hex
        large = len(data) > PART_BYTES and mode == "overwrite"
        with self._errors("writing", name):
            try:
                done = obstore.put(
                    self._connection.hasty if hasty else self._connection.patient,
                    self._key(name),
                    data,
                    attributes={TOKEN: token},
                    mode=mode,
                    use_multipart=large,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARALLEL,
                )
                return str(done["e_tag"])
            except (BaseError, OSError):
                if self._was_written(name, token):  # the answer was lost, and the repetition refused
                    return str(self._head(name)["e_tag"])
                raise

    def _was_written(self, name: str, token: str) -> bool:
        """Whether what has the name is from the write with this token."""
        try:
            found = obstore.get(self._connection.patient, self._key(name), options={"head": True})
        except (BaseError, OSError):
            return False
        return bool(found.attributes.get(TOKEN) == token)

    def _get(self, name: str, wanted: Any = None, e_tag: str | None = None) -> bytes:
        options: Any = {"range": wanted, "if_match": e_tag}
        given: Any = {key: value for key, value in options.items() if value is not None}

        def ask() -> bytes:
            return bytes(obstore.get(self._connection.patient, self._key(name), options=given).bytes())

        return _repeated(ask)

    def _head(self, name: str) -> Any:
        with self._errors("reading", name):
            return obstore.head(self._connection.patient, self._key(name))

    def _directly(self, folder: str) -> Any:
        with self._errors("listing", folder):
            return _repeated(lambda: obstore.list_with_delimiter(self._connection.patient, self._key(folder) or None))

    def read_lease(self, name: str) -> tuple[dict[str, Any], str] | None:
        """See `stores.lease.Conditional`."""

        def ask() -> tuple[bytes, str]:
            found = obstore.get(self._connection.patient, self._key(name))
            return bytes(found.bytes()), str(found.meta["e_tag"])

        with self._errors("reading", name):
            try:
                data, e_tag = _repeated(ask)
            except FileNotFoundError:
                return None
        try:
            content = json.loads(data)
        except ValueError:
            content = None
        return (content if isinstance(content, dict) else {}), e_tag

    def write_lease(self, name: str, content: Mapping[str, Any], before: str | None) -> str | None:
        """See `stores.lease.Conditional`."""
        mode: Any = {"e_tag": before} if before else "create"
        try:
            return self._put(name, json.dumps(content).encode(), mode=mode, hasty=True)
        except (AlreadyExistsError, PreconditionError):
            return None

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        """Turns what obstore raises into what a storage raises; conditions that were not met pass."""
        try:
            yield
        except (StorageError, AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", self.at(name)) from None
            raise StorageError(f"{action} {self.at(name)}: {_reason(error)}") from None
        except (BaseError, OSError) as error:
            raise StorageError(f"{action} {self.at(name)}: {_reason(error)}") from None  # its text may show a key


class _Upload:
    """See `stores.backend.Writable`: the parts of an object that is not there yet."""

    def __init__(self, bucket: Bucket, name: str, upload: Any) -> None:
        self._bucket = bucket
        self._name = name
        self._upload = upload

    def write(self, data: Any, /) -> None:
        with self._bucket._errors("writing", self._name):
            self._upload.write(data)


class _Object(Readable):
    """See `stores.backend.Readable`: an object, as long as it is the one that it was."""

    def __init__(self, bucket: Bucket, name: str, head: Any) -> None:
        self._bucket = bucket
        self._name = name
        self._e_tag = head["e_tag"]
        self.size = head["size"]

    def read(self, begin: int, end: int) -> bytes:
        end = min(end, self.size)
        return self._range(begin, end) if begin < end else b""

    def read_into(self, begin: int, view: memoryview) -> int:
        """Large ones in ranges, several at a time."""
        count = max(0, min(len(view), self.size - begin))

        def fill(start: int) -> None:
            stop = min(start + RANGE_BYTES, count)
            view[start:stop] = self._range(begin + start, begin + stop)

        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="range") as pool:
            list(pool.map(fill, range(0, count, RANGE_BYTES)))
        return count

    def _range(self, begin: int, end: int) -> bytes:
        with self._bucket._errors("reading", self._name):
            try:
                return self._bucket._get(self._name, (begin, end), self._e_tag)
            except PreconditionError:
                at = self._bucket.at(self._name)
                raise StorageError(f"reading {at}: it was replaced while it was read; start again") from None


def _repeated(ask: Callable[[], T]) -> T:
    """Asks again where an answer broke off in the middle; where none came, obstore does."""
    for wait_s in CUT_WAITS_S:
        try:
            return ask()
        except BaseError as error:
            if "response body error" not in str(error):
                raise
            time.sleep(wait_s)
    return ask()


def _reason(error: BaseException) -> str:
    """What the server said, without what it repeats of the request: that may be a key."""
    text = str(error).partition("\n\nDebug source")[0]
    said = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if said is not None:
        parts = [said[1].strip(), *(part[1] for part in (code, message) if part)]
    else:
        parts = [text.rpartition(" - ")[2]]
    advice = "check network and endpoint, then run the same command again"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "403" in parts[0]:
        advice = "check the credentials and what they may do in the bucket"
    elif code is not None and code[1] == "NoSuchBucket":
        advice = "check the bucket's name"
    return f"{' '.join(': '.join(parts).split())[:SHOWN_CHARACTERS]}; {advice}"
