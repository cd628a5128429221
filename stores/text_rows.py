"""Takes the text out of the rows of files and datasets; skips and counts rows without text, and refuses too many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from manifests.errors import InputError

DEFAULT_FIELD = "text"
MOST_SKIPPED = 0.05  # share of rows without text; with more of them the field is probably the wrong one
JUDGED_FROM = 1000  # rows from which the share is judged while more may follow
TURN_FIELDS = ({"role", "content"}, {"from", "value"})  # of a turn of a chat

SkippedRows = dict[str, int]  # file or dataset -> rows without text


def skipped_lines(skipped: SkippedRows) -> list[str]:
    """Return a line for each file or dataset of which rows were skipped."""
    return [f"{origin}: {count:,} rows without text are left out" for origin, count in skipped.items()]


class Document(NamedTuple):
    """A document, and its place: the file, and the row in it."""

    place: str
    text: str


class Row(NamedTuple):
    """A row of a file or dataset: a text, or an object with fields. `where`: its place; empty for a whole file."""

    where: str
    item: Any


def documents_of(
    rows: Iterable[Row], origin: str, field: str | None, skipped: SkippedRows | None = None
) -> Iterator[Document]:
    """Yield the document of each row, in order. Rows whose text is null or missing are skipped, empty texts are not.

    Args:
        origin: names the file or dataset in errors.
        field: of rows that are objects; None: DEFAULT_FIELD.
        skipped: gets the number of skipped rows under `origin`.

    Raises InputError: a row holds something else than text, or more than MOST_SKIPPED of the rows hold none.
    """
    first, missing, count = None, 0, 0
    for row in rows:
        count += 1
        place = f"{origin}, {row.where}" if row.where else origin
        text = _text(place, row.item, field)
        if isinstance(text, str):
            yield Document(place, text)
            continue
        first, missing = first or text, missing + 1
        if skipped is not None:
            skipped[origin] = missing
        _judge(first, missing, count, max(count, JUDGED_FROM))
    _judge(first, missing, count, count)


def _judge(first: InputError | None, missing: int, count: int, of: int) -> None:
    if first is not None and missing > MOST_SKIPPED * of:
        raise InputError(
            f"{first}; {missing:,} of {count:,} rows hold no text there, and at most {MOST_SKIPPED:.0%} are skipped"
        )


def _text(place: str, item: Any, field: str | None) -> str | InputError:
    """Return the text of a row, or the reason why it has none. Raises InputError if it holds something else."""
    column = field or DEFAULT_FIELD
    if item is None:
        return InputError(f"{place}: is null; leave such rows out")
    if isinstance(item, str) and field is None:
        return _checked(place, item)
    if not isinstance(item, Mapping):
        raise InputError(f"{place}: a JSON {type(item).__name__}, expected an object with the field {column!r}")
    if column not in item:
        return missing_field(place, column, item)
    value = item[column]
    if value is None:
        return InputError(f"{place}: field {column!r} is null; set `field` to another, or leave such rows out")
    if not isinstance(value, str):
        kind = "a chat" if _is_chat(value) else type(value).__name__
        raise InputError(f"{place}: field {column!r} is {kind}, expected text; {_advice(item)}")
    return _checked(place, value)


def missing_field(place: str, column: str, fields: Mapping[str, Any]) -> InputError:
    """Return the error for a row, or a file whose first row has these fields, without the field `column`."""
    return InputError(f"{place}: no field {column!r}; {_advice(fields)}")


def _advice(item: Mapping[str, Any]) -> str:
    """Return which fields of a row hold text, and what to do with its chats."""
    texts = [name for name, value in item.items() if isinstance(value, str)]
    chats = [name for name, value in item.items() if _is_chat(value)]
    fields = f"set `field` to one of {', '.join(map(repr, texts))}" if texts else "none of its fields is text"
    if not texts and not chats:
        return f"{fields}: {', '.join(map(repr, item))}"
    return "; ".join([fields, *(_chat_advice(name, "tools" in item) for name in chats[:1])])


def _chat_advice(name: str, has_tools: bool) -> str:
    tools = ", tools=row['tools']" if has_tools else ""
    return (
        f"{name!r} holds chats, which are not read as they are: write each as one text, with the model's template, by "
        f"tokenizer.apply_chat_template(row[{name!r}]{tools}, tokenize=False)"
    )


def _is_chat(value: Any) -> bool:
    """True for a list of turns, such as {"role": …, "content": …}."""
    return isinstance(value, list) and bool(value) and all(_is_turn(turn) for turn in value)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and any(fields <= turn.keys() for fields in TURN_FIELDS)


def _checked(place: str, text: str) -> str:
    """Refuse lone surrogates, which JSON can escape but neither UTF-8 nor tokenizers accept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: half a surrogate pair at character {error.start}; it is not text") from error
    return text
