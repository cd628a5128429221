"""Storage in a bucket: S3, or a service with its protocol. docs/formats.md#buckets.

An object appears whole, and is durable, when its last request is answered. `put_if_absent` is a PUT with
`If-None-Match`; a lock is a lease that its owner renews with `If-Match`. Each object carries the token of the write
that created it, so that a writer whose answer was lost can find out whether the write succeeded.

Credentials, region and endpoint come from where AWS's tools look: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, web identity, the container's or the instance's role. No message
shows them.
"""

from __future__ import annotations

import errno
import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from manifests.errors import InputError, StorageError
from stores import lease
from stores.backend import Readable, Storage, Writable
from stores.bucket_client import SERVICES, Connection, repeated, server_reason
from stores.lease import Lease, LeaseStore, is_gone, take_lease
from stores.threads import parallel_map

SCHEMES = "|".join(SERVICES)
ADDRESS = re.compile(
    rf"(?P<scheme>{SCHEMES})://(?P<bucket>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?P<prefix>(/[^/?#]+)*)/?"
)
TOKEN = "lamina-write"
PART_BYTES = 16 * 1024 * 1024  # an object has at most 10,000 parts
RANGE_BYTES = 16 * 1024 * 1024
PARALLEL = 4
COPY_BYTES = 5 * 1000**3  # limit of one copy request


class Bucket(Storage, LeaseStore):
    """The objects of a bucket below a prefix, by the address `s3://bucket/prefix`."""

    def __init__(self, address: str, connection: Connection | None = None) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None:
            raise InputError(
                f"{address}: not a bucket address; expected s3://BUCKET or s3://BUCKET/FOLDER, where BUCKET is 3 to "
                "63 lower-case letters, digits, dots and hyphens, and FOLDER has no ? or #"
            )
        self.scheme, self.bucket = match["scheme"], match["bucket"]
        self.prefix = match["prefix"].lstrip("/")
        self._connection = connection or Connection(self.scheme, self.bucket)

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
        yield _Upload(self, name, upload)  # after an exception the upload is never completed: no object appears
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
        span: Any = {"suffix": -begin} if begin < 0 else (begin, end) if end is not None else {"offset": begin}
        with self._errors("reading", name):
            try:
                return self._get(name, span if span != {"offset": 0} else None)
            except BaseError:
                if self.size(name) <= max(0, begin):  # an empty range is an error in S3
                    return b""
                raise

    def read_whole(self, name: str, limit_bytes: int) -> bytes:
        data = self.read(name, end=limit_bytes + 1)  # one request
        if len(data) > limit_bytes:
            raise ValueError(f"more than {limit_bytes:,} bytes")
        return data

    @contextmanager
    def reader(self, name: str) -> Iterator[Readable]:
        try:
            yield _Object(self, name, self._head(name))
        except FileNotFoundError as error:
            raise StorageError(f"reading {self.at(name)}: no such object; check the address") from error

    def stamp(self, name: str) -> dict[str, int | str]:
        head = self._head(name)
        return {"size": head["size"], "e_tag": str(head["e_tag"]), "modified": head["last_modified"].isoformat()}

    def modified_times(self, folder: str = "") -> dict[str, float]:
        def ask() -> list[Any]:
            return [
                head for batch in obstore.list(self._connection.patient, self._key(folder) or None) for head in batch
            ]

        with self._errors("listing", folder):
            times = {self._name(head["path"]): head["last_modified"].timestamp() for head in repeated(ask)}
        return dict(sorted(times.items()))

    def folders(self, folder: str = "") -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self._list_level(folder)["common_prefixes"])

    def files(self, folder: str = "") -> list[str]:
        return sorted(head["path"].rpartition("/")[2] for head in self._list_level(folder)["objects"])

    def children(self, folder: str = "") -> list[str]:
        return sorted({*self.folders(folder), *self.files(folder)})

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        with self._errors("removing from", ""):
            if keys:
                repeated(lambda: obstore.delete(self._connection.patient, keys))

    def link_or_copy(self, name: str, source: Storage, source_name: str) -> None:
        is_near = isinstance(source, Bucket) and (source.scheme, source.bucket) == (self.scheme, self.bucket)
        if isinstance(source, Bucket) and is_near and source.size(source_name) <= COPY_BYTES:
            with self._errors("copying", name):
                keys = source._key(source_name), self._key(name)
                repeated(lambda: obstore.copy(self._connection.patient, *keys))
        else:
            super().link_or_copy(name, source, source_name)

    def prepare(self, folders: Iterable[str] = ()) -> None:
        # Commits and locks rely on conditional writes.
        probe = f".lamina.probe-{uuid.uuid4().hex}"
        self.put_if_absent(probe, b"probe")
        refusals = 0
        for mode in ("create", {"e_tag": '"another"'}):
            try:
                self._put(probe, b"again", mode=mode)
            except (AlreadyExistsError, PreconditionError):
                refusals += 1
        if refusals < 2:
            with suppress(StorageError):
                self.delete([probe])
            raise StorageError(
                f"{self.at()}: this bucket ignores the conditions If-None-Match or If-Match of a PUT, so that two jobs "
                "could overwrite each other's commits; use a bucket that keeps both"
            )
        self.delete([probe])

    def fault(self) -> str | None:
        try:
            repeated(lambda: next(iter(obstore.list(self._connection.hasty, self._key("") or None)), None))
        except (BaseError, OSError) as error:
            return f"cannot be listed: {server_reason(error)}"
        return None

    def hold(self, name: str) -> Lease:
        return take_lease(self, name)

    def is_held(self, name: str) -> bool:
        lease_and_tag = self.read_lease(name)
        if lease_and_tag is None or lease_and_tag[0].get("released") or is_gone(lease_and_tag[0]):
            return False
        return time.time() - float(self._head(name)["last_modified"].timestamp()) < lease.LEASE_S

    def below(self, folder: str) -> Bucket:
        return Bucket(self.at(folder), self._connection)

    def at(self, name: str = "") -> str:
        return f"{self.scheme}://" + "/".join(filter(None, (self.bucket, self.prefix, name)))

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.prefix, name)))

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.prefix}/") if self.prefix else key

    def _put(self, name: str, data: Any, mode: Any = "overwrite", hasty: bool = False) -> str:
        """Write an object and return its entity tag. Raises AlreadyExistsError and PreconditionError by `mode`."""
        token = uuid.uuid4().hex
        large = len(data) > PART_BYTES and mode == "overwrite"

        def ask() -> str:
            try:
                answer = obstore.put(
                    self._connection.hasty if hasty else self._connection.patient,
                    self._key(name),
                    data,
                    attributes={TOKEN: token},
                    mode=mode,
                    use_multipart=large,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARALLEL,
                )
                return str(answer["e_tag"])
            except (BaseError, OSError):
                if self._was_written(name, token):  # the answer was lost, and the retry was refused
                    return str(self._head(name)["e_tag"])
                raise

        with self._errors("writing", name):
            return repeated(ask)

    def _was_written(self, name: str, token: str) -> bool:
        """True if the object was created by the write with this token."""
        try:
            answer = obstore.get(self._connection.patient, self._key(name), options={"head": True})
        except (BaseError, OSError):
            return False
        return bool(answer.attributes.get(TOKEN) == token)

    def _get(self, name: str, span: Any = None, e_tag: str | None = None) -> bytes:
        conditions = {"range": span, "if_match": e_tag}
        options: Any = {key: value for key, value in conditions.items() if value is not None}
        return repeated(lambda: bytes(obstore.get(self._connection.patient, self._key(name), options=options).bytes()))

    def _head(self, name: str) -> Any:
        with self._errors("reading", name):
            return obstore.head(self._connection.patient, self._key(name))

    def _list_level(self, folder: str) -> Any:
        with self._errors("listing", folder):
            return repeated(lambda: obstore.list_with_delimiter(self._connection.patient, self._key(folder) or None))

    def read_lease(self, name: str) -> tuple[dict[str, Any], str] | None:
        def ask() -> tuple[bytes, str]:
            answer = obstore.get(self._connection.patient, self._key(name))
            return bytes(answer.bytes()), str(answer.meta["e_tag"])

        with self._errors("reading", name):
            try:
                data, e_tag = repeated(ask)
            except FileNotFoundError:
                return None
        try:
            content = json.loads(data)
        except ValueError:
            content = None
        return (content if isinstance(content, dict) else {}), e_tag

    def write_lease(self, name: str, content: Mapping[str, Any], before: str | None) -> str | None:
        mode: Any = {"e_tag": before} if before else "create"
        try:
            return self._put(name, json.dumps(content).encode(), mode=mode, hasty=True)
        except (AlreadyExistsError, PreconditionError):
            return None

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        """Convert obstore's errors to those of a storage; failed conditions pass."""
        try:
            yield
        except (StorageError, AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", self.at(name)) from None
            raise StorageError(f"{action} {self.at(name)}: {server_reason(error)}") from None
        except (BaseError, OSError) as error:
            raise StorageError(f"{action} {self.at(name)}: {server_reason(error)}") from None  # its text may show a key


class _Upload(Writable):
    """The parts of an object that does not exist yet."""

    def __init__(self, bucket: Bucket, name: str, upload: Any) -> None:
        self._bucket = bucket
        self._name = name
        self._upload = upload

    def write(self, data: Any, /) -> None:
        with self._bucket._errors("writing", self._name):
            self._upload.write(data)


class _Object(Readable):
    """One version of an object: a read fails once the object is replaced."""

    def __init__(self, bucket: Bucket, name: str, head: Any) -> None:
        self._bucket = bucket
        self._name = name
        self.tag = str(head["e_tag"])
        self.size = head["size"]

    def read(self, begin: int, end: int) -> bytes:
        end = min(end, self.size)
        return self._range(begin, end) if begin < end else b""

    def read_into(self, begin: int, view: memoryview) -> int:
        return self.read_spans([(begin, view)])[0]

    def read_spans(self, spans: Sequence[tuple[int, memoryview]]) -> list[int]:
        # Adjacent spans share a request, large ones are split, and several requests run at a time.
        counts = [max(0, min(len(view), self.size - begin)) for begin, view in spans]
        requests: list[list[tuple[int, memoryview]]] = []
        for (begin, view), count in zip(spans, counts, strict=True):
            for start in range(0, count, RANGE_BYTES):
                piece = (begin + start, view[start : min(start + RANGE_BYTES, count)])
                if requests and _end(requests[-1]) == piece[0] and _end([piece]) - requests[-1][0][0] <= RANGE_BYTES:
                    requests[-1].append(piece)
                else:
                    requests.append([piece])

        def fill(pieces: list[tuple[int, memoryview]]) -> None:
            first = pieces[0][0]
            data = memoryview(self._range(first, _end(pieces)))
            for begin, view in pieces:
                view[:] = data[begin - first : begin - first + len(view)]

        parallel_map(fill, requests, PARALLEL)
        return counts

    def _range(self, begin: int, end: int) -> bytes:
        with self._bucket._errors("reading", self._name):
            try:
                return self._bucket._get(self._name, (begin, end), self.tag)
            except PreconditionError:
                at = self._bucket.at(self._name)
                raise StorageError(f"reading {at}: it was replaced while it was read; start again") from None


def _end(pieces: list[tuple[int, memoryview]]) -> int:
    return pieces[-1][0] + len(pieces[-1][1])
