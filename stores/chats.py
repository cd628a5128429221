"""Writes conversations as text, by the chat template of a model's tokenizer."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from manifests.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_FIELDS = ({"role", "content"}, {"from", "value"})  # of a turn of a chat
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}  # names of roles beside `from`
ROLES = ("system", "user", "assistant", "tool")
PROBE = "lamina_probe"  # a word that no template contains
PROBE_TOOL = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}


class Conversation(str):
    """The text of a conversation. Its chat template has written all of it, so that no EOS is added.

    `empty`: all messages are white space and call no tool, so that the text is the template's alone.
    """

    empty = False


class DamagedError(ValueError):
    """A conversation that cannot be written: its row is left out."""


class ChatTemplate:
    """The chat template of a tokenizer with the arguments of a manifest's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})

    @property
    def exists(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    def write(self, messages: Any, tools: Any = None, null_filled: bool = False) -> Conversation:
        """Return the text of a conversation, with the template's own BOS. Raises DamagedError.

        Args:
            messages, tools: as objects or in JSON.
            null_filled: null stands for a field that an object does not have.
        """
        if null_filled:
            messages, tools = without_nulls(messages), without_nulls(tools)
        turns = _parsed(messages)
        if not isinstance(turns, list) or not turns:
            raise DamagedError("holds no list of messages")
        checked = [self._message(number, turn) for number, turn in enumerate(turns)]
        described = _parsed(tools) or None
        if described is not None and not (
            isinstance(described, list) and all(isinstance(t, Mapping) for t in described)
        ):
            raise DamagedError("its tools are not a list of objects")
        written = self._render(checked, described)
        for name in _called(checked):
            if name not in written:
                raise DamagedError(f"calls the tool {name!r}, and the chat template writes no calls")
        conversation = Conversation(written)
        conversation.empty = not any(
            message.get("tool_calls") or _text_of("", message["content"]).strip() for message in checked
        )
        return conversation

    @cached_property
    def writes_tools(self) -> bool:
        """True if the template writes the tools of a conversation."""
        return self._shows("a", [{"type": "function", "function": PROBE_TOOL}])

    @cached_property
    def unknown_arguments(self) -> list[str]:
        """The arguments that the template does not name, so that they would change nothing."""
        read = inspect.signature(self._tokenizer.apply_chat_template).parameters
        names = (name for name in self._arguments if name not in read)
        return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", self._source)]

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template loses a content that is text, but writes it as a list of parts."""
        return not self._shows(PROBE) and self._shows([{"type": "text", "text": PROBE}])

    @cached_property
    def _source(self) -> str:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else "".join((template or {}).values())

    def _shows(self, content: Any, tools: Sequence[Any] | None = None) -> bool:
        try:
            return PROBE in self._render([{"role": "user", "content": content}], tools)
        except DamagedError:
            return False

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        try:
            written = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, tokenize=False, **self._arguments
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise DamagedError(f"the chat template refuses it: {type(error).__name__}: {error}") from error
        assert isinstance(written, str)
        return written

    def _message(self, number: int, turn: Any) -> dict[str, Any]:
        """Return a message as templates read it."""
        where = f"message {number}"
        if not isinstance(turn, Mapping) or not {"role", "from"} & turn.keys():
            raise DamagedError(f"{where} has no role")
        message = {name: value for name, value in turn.items() if value is not None}
        if "role" not in message and "from" in message:
            speaker = message.pop("from")
            message["role"], message["content"] = SPEAKERS.get(speaker, speaker), message.pop("value", None)
        role = message.get("role")
        if not isinstance(role, str) or (role not in ROLES and f"'{role}'" not in self._source.replace('"', "'")):
            raise DamagedError(f"{where} has the role {role!r}, which the chat template does not know")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call(where, call) for call in _list(where, "tool_calls", calls)]
        else:
            message.pop("tool_calls", None)
        content = _text_of(where, message.get("content", "" if calls else None))
        message["content"] = [{"type": "text", "text": content}] if self._takes_parts else content
        return message


def is_chat(value: Any) -> bool:
    """True for a list of turns, such as {"role": …, "content": …}."""
    return isinstance(value, list) and bool(value) and all(map(is_turn, value))


def is_turn(turn: Any) -> bool:
    """True for an object with a role and a content."""
    return isinstance(turn, Mapping) and any(fields <= turn.keys() for fields in TURN_FIELDS)


def no_template(place: str, field: str) -> InputError:
    """Return the error about conversations that no template can write."""
    return InputError(
        f"{place}: field {field!r} holds conversations, but the tokenizer has no chat template; put the "
        "chat_template.jinja of the instruct model beside the tokenizer, or give text"
    )


def _text_of(where: str, content: Any) -> str:
    """Return a content as text: its own, or that of its parts."""
    if content is None:
        raise DamagedError(f"{where}: the content is null")
    if isinstance(content, str):
        return content
    texts = []
    for part in _list(where, "content", content, "text or a list of parts"):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DamagedError(f"{where}: the content has a part of the type {kind!r}, which is not text")
    return "\n".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which templates write as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DamagedError(f"{where}: a tool call has no name")
    parsed = {**function, "arguments": _parsed(function.get("arguments", {}))}
    return {**call, "function": parsed} if "function" in call else parsed


def _called(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the tools that messages call."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield call.get("function", call)["name"]


def _list(where: str, name: str, value: Any, expected: str = "a list") -> list[Any]:
    if not isinstance(value, list):
        raise DamagedError(f"{where}: {name} is {type(value).__name__}, expected {expected}")
    return value


def _parsed(value: Any) -> Any:
    """Return a value that may be written as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """Return a value without fields that are null: Parquet gives every object the fields of all others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(child) for name, child in value.items() if child is not None}
    return [without_nulls(child) for child in value] if isinstance(value, list) else value
