"""Takes the text out of the rows of files and datasets; counts rows without text, and refuses too many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from manifests.calibration import Text
from manifests.errors import InputError
from stores.chats import ChatTemplate, Conversation, DamagedError, is_chat, no_template

DEFAULT_FIELD = "text"
CHAT_FIELD = "messages"  # read as conversations, damaged ones too, where no other field shows what to read
TOOLS_FIELD = "tools"
MOST_SKIPPED = 0.05  # share of rows without text; with more of them the field is probably the wrong one
JUDGED_FROM = 1000  # rows from which the share is judged while more may follow


@dataclass
class Reading:
    """Counts of the rows that were read of a file or dataset.

    Attributes:
        documents: rows with text. `conversations`, `empty`: how many of these are conversations, or white space alone.
        refused: rows that are left out; `first`: why the first one is.
        without_tools: conversations whose tools the chat template does not write.
    """

    origin: str
    documents: int = 0
    conversations: int = 0
    empty: int = 0
    refused: int = 0
    first: str | None = None
    without_tools: int = 0

    def add(self, document: str) -> None:
        """Count a document."""
        self.documents += 1
        self.conversations += isinstance(document, Conversation)
        self.empty += document.empty if isinstance(document, Conversation) else not document.strip()

    def left_out(self) -> Iterator[str]:
        """Yield a line for each kind of thing that was left out."""
        if self.refused:
            kind = f"damaged conversations are left out; the first: {self.first}"
            yield f"{self.origin}: {self.refused:,} {kind if self.conversations else 'rows without text are left out'}"
        if self.without_tools:
            yield f"{self.origin}: the chat template does not write the tools of {self.without_tools:,} conversations"


@dataclass(frozen=True)
class ReadText:
    """The counts of a text that was read: of each file or dataset, and the tokens of all."""

    readings: tuple[Reading, ...] = ()
    tokens: int = 0

    def refused(self) -> dict[str, int]:
        """Map each file or dataset of which rows were left out to their number."""
        return {reading.origin: reading.refused for reading in self.readings if reading.refused}

    def extent(self) -> str:
        """Return the counts in words."""
        count = {
            name: sum(getattr(reading, name) for reading in self.readings)
            for name in ("documents", "conversations", "empty", "refused")
        }
        notes = [
            f"{count['conversations']:,} of them conversations" if count["conversations"] else "",
            f"{count['empty']:,} of them empty" if count["empty"] else "",
            f"{count['refused']:,} others left out" if count["refused"] else "",
        ]
        documents = f"{count['documents']:,} document{'' if count['documents'] == 1 else 's'}"
        return f"{', '.join(filter(None, (documents, *notes)))}; {self.tokens:,} tokens read"

    def left_out(self) -> list[str]:
        """Return a line for each kind of thing that was left out of a file or dataset."""
        return [line for reading in self.readings for line in reading.left_out()]

    def as_json(self) -> dict[str, Any]:
        """Return all counts."""
        return asdict(self)


NOTHING_READ = ReadText()


class Document(NamedTuple):
    """A document, and its place: the file, and the row in it."""

    place: str
    text: str


class Row(NamedTuple):
    """A row of a file or dataset: a text, or an object with fields.

    Attributes:
        where: its place; empty for a whole file.
        null_filled: null stands for a field that an object does not have.
    """

    where: str
    item: Any
    null_filled: bool = False


class RowFields(NamedTuple):
    """The fields of rows that are read: those of text, or that of conversations and that of their tools."""

    texts: tuple[str, ...]
    messages: str | None = None
    tools: str = TOOLS_FIELD


def row_fields(text: Text, item: Mapping[str, Any]) -> RowFields | None:
    """Return the fields to read of a row; None if a manifest's text names none, and the row leaves it open."""
    if text.messages is not None:
        return RowFields((), text.messages, text.tools or TOOLS_FIELD)
    if text.fields or (DEFAULT_FIELD in item and not text.has_conversations):
        return RowFields(text.fields or (DEFAULT_FIELD,))
    chats = [name for name, value in item.items() if is_chat(value)]
    return RowFields((), chats[0], text.tools or TOOLS_FIELD) if len(chats) == 1 else None


def presumed_fields(text: Text, item: Mapping[str, Any]) -> RowFields | None:
    """Return the fields of a row whose field `messages` holds no conversation, so that it is reported as damaged."""
    if CHAT_FIELD not in item or any(map(is_chat, item.values())):
        return None
    return RowFields((), CHAT_FIELD, text.tools or TOOLS_FIELD)


class RowTexts:
    """Takes the texts of rows by a manifest's text.

    `template` writes conversations; None: they are refused. `objects`: texts are fields of rows.
    """

    def __init__(self, text: Text, template: ChatTemplate | None, objects: bool = False) -> None:
        self._text = text
        self._template = template
        self._objects = objects or bool(text.fields) or text.has_conversations
        self._fields: RowFields | None = None  # those of the first row that shows them
        self._names: dict[str, None] = {}  # of all fields of conversations, where `tools` names one

    def document(self, place: str, row: Row, reading: Reading) -> str | InputError:
        """Return the text of a row, or the reason why it has none. Raises InputError if it holds something else."""
        item = row.item
        if item is None:
            return InputError(f"{place}: is null; leave such rows out")
        if isinstance(item, str) and not self._objects:
            return _checked(place, item)
        if not isinstance(item, Mapping):
            kind = "a bare list of messages" if is_chat(item) else f"a JSON {type(item).__name__}"
            expected = f'an object {{"{CHAT_FIELD}": […]}}' if is_chat(item) else f"an object with {self._expected()}"
            raise InputError(f"{place}: {kind}, expected {expected}")
        self._fields = self._fields or row_fields(self._text, item)
        if (fields := self._fields or presumed_fields(self._text, item)) is None:
            return missing_field(place, self._text, item)
        if fields.messages is not None:
            return self._conversation(place, row, fields, reading)
        return self._joined(place, item, fields.texts)

    def check_tools(self, origin: str) -> None:
        """Raise InputError if `tools` names a field that no conversation so far has."""
        if self._names and self._text.tools not in self._names:
            raise missing_tools(origin, self._text, self._names)

    def _expected(self) -> str:
        if self._text.has_conversations and self._text.messages is None:
            return "a field of conversations"
        names = [self._text.messages] if self._text.messages else self._text.fields or (DEFAULT_FIELD,)
        return " and ".join(f"the field {name!r}" for name in names)

    def _joined(self, place: str, item: Mapping[str, Any], names: Sequence[str]) -> str | InputError:
        """Return the texts of several fields, with a line break between two that have no white space there."""
        texts: list[str] = []
        for name in names:
            if name not in item:
                return missing_field(place, self._text, item, name)
            value = item[name]
            if value is None:
                return InputError(f"{place}: field {name!r} is null; set `field` to another, or leave such rows out")
            if not isinstance(value, str):
                kind = "a chat" if is_chat(value) else type(value).__name__
                raise InputError(f"{place}: field {name!r} is {kind}, expected text; {_advice(item)}")
            spaced = not texts or not value or not texts[-1] or texts[-1][-1:].isspace() or value[:1].isspace()
            texts += [value] if spaced else ["\n", value]
        return _checked(place, "".join(texts))

    def _conversation(self, place: str, row: Row, fields: RowFields, reading: Reading) -> str | InputError:
        assert fields.messages is not None
        name, tools = fields.messages, row.item.get(fields.tools)
        if name not in row.item:
            return missing_field(place, self._text, row.item, name)
        if self._template is None or not self._template.exists:
            raise no_template(place, name)
        self._names |= dict.fromkeys(row.item) if self._text.tools is not None else {}
        if unknown := self._template.unknown_arguments:
            raise InputError(
                f"{place}: template: the chat template has no argument {', '.join(unknown)}; correct the name, or "
                "leave it out"
            )
        if tools and not self._template.writes_tools:
            if self._text.tools is not None:
                raise InputError(
                    f"{place}: field {fields.tools!r} holds tools, and the chat template writes none; leave out `tools`"
                )
            reading.without_tools += 1
        try:
            written = self._template.write(row.item[name], tools, row.null_filled)
        except DamagedError as error:
            return InputError(f"{place}: field {name!r}: {error}")
        _checked(place, written)
        return written


def documents_of(rows: Iterable[Row], texts: RowTexts, reading: Reading) -> Iterator[Document]:
    """Yield the document of each row, in order. Rows whose text is null or missing, and damaged conversations, are left
    out; empty texts are not.

    `reading`: gets the counts; its `origin` names the file or dataset in errors.

    Raises InputError: a row holds something else than text, more than MOST_SKIPPED of the rows hold none, or none has
    the field that `tools` names.
    """
    first, count = None, 0
    for row in rows:
        count += 1
        place = f"{reading.origin}, {row.where}" if row.where else reading.origin
        text = texts.document(place, row, reading)
        if row.null_filled or count == JUDGED_FROM:
            texts.check_tools(reading.origin)
        if isinstance(text, str):
            reading.add(text)
            yield Document(place, text)
            continue
        first, reading.refused = first or text, reading.refused + 1
        reading.first = reading.first or str(text)
        _judge(first, reading.refused, count, max(count, JUDGED_FROM))
    _judge(first, reading.refused, count, count)
    texts.check_tools(reading.origin)


def _judge(first: InputError | None, refused: int, count: int, of: int) -> None:
    if first is not None and refused > MOST_SKIPPED * of:
        raise InputError(
            f"{first}; {refused:,} of {count:,} rows hold no text there, and at most {MOST_SKIPPED:.0%} are skipped"
        )


def missing_tools(place: str, text: Text, fields: Iterable[str]) -> InputError:
    """Return the error for rows with these fields, without that of tools."""
    return InputError(
        f"{place}: no row has the field {text.tools!r} of `tools` (init, evaluate: --tools); name one of "
        f"{', '.join(map(repr, fields))}, or leave it out"
    )


def missing_field(place: str, text: Text, fields: Mapping[str, Any], name: str | None = None) -> InputError:
    """Return the error for a row, or a file whose first row has these fields, without the field `name`, or without one
    that shows what to read."""
    chats = [each for each, value in fields.items() if is_chat(value)]
    if name is None and len(chats) > 1:
        names = ", ".join(map(repr, chats))
        return InputError(f"{place}: conversations in {names}; set `messages` (init: --messages) to one of them")
    if name is None and text.has_conversations:
        names = ", ".join(map(repr, fields))
        return InputError(
            f"{place}: no field of conversations, for which `tools` and `template` are; leave them out, or set "
            f"`messages` (init: --messages) to one of {names}"
        )
    return InputError(f"{place}: no field {name or DEFAULT_FIELD!r}; {_advice(fields)}")


def _advice(item: Mapping[str, Any]) -> str:
    """Return which fields of a row hold text or conversations."""
    texts = [repr(name) for name, value in item.items() if isinstance(value, str)]
    chats = [repr(name) for name, value in item.items() if is_chat(value)]
    several = " or to a list of them" if len(texts) > 1 else ""
    advice = [f"set `field` (init: --field) to one of {', '.join(texts)}{several}"] if texts else []
    advice += (
        [f"set `messages` (init: --messages) to one of {', '.join(chats)}, which hold conversations"] if chats else []
    )
    return ", or ".join(advice) or f"none of its fields is text: {', '.join(map(repr, item))}"


def _checked(place: str, text: str) -> str:
    """Refuse lone surrogates, which JSON can escape but neither UTF-8 nor tokenizers accept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: half a surrogate pair at character {error.start}; it is not text") from error
    return text
