"""Conversations as text, as transformers writes them, and damaged conversations."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.calibration import Text
from manifests.errors import InputError
from manifests.loading import parse_block
from stores.chats import ChatTemplate, DamagedError
from stores.corpus import count_tokens, draw_samples, evaluation_ids, read_documents
from stores.text_rows import JUDGED_FROM, Reading, ReadText
from tests.stores.test_corpus import BOS, EOS, make_tokenizer
from tests.stores.test_text_files import ROWS, write_rows

# With a BOS, an end of its own, tools, calls, an argument, a role of its own, and a rule.
TEMPLATE = """<s> {% if tools %}{{ tools | tojson }} {% endif %}{% for message in messages %}\
{% if message.role == 'system' and not loop.first %}{{ raise_exception('system is not first') }}{% endif %}\
{% if message.role == 'critic' %}critic {% endif %}{{ message.content }} \
{% for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }} {% endfor %}\
{% endfor %}{{ ending if ending is defined else 'w99' }}
"""
PLAIN = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }} {% endfor %}{% endfor %}"
CHAT = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "required": ["at"]}}}


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def call(arguments: Any, name: str = "look") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def written(messages: Any, tools: Any = None, template: str = TEMPLATE, **arguments: Any) -> str:
    return ChatTemplate(tokenizer_with(template), arguments).write(messages, tools)


def damage(messages: Any, template: str = TEMPLATE) -> str:
    with pytest.raises(DamagedError) as caught:
        written(messages, template=template)
    return str(caught.value)


def test_the_template_writes_all_of_a_conversation() -> None:
    tokenizer = tokenizer_with()
    assert written(CHAT) == tokenizer.apply_chat_template(CHAT, tokenize=False) == "<s> w1 w2 w3 w99"
    assert written(CHAT, ending="w5") == "<s> w1 w2 w3 w5"
    assert written(CHAT, [TOOL]) == written(CHAT, json.dumps([TOOL])) == f"<s> {json.dumps([TOOL])} w1 w2 w3 w99"
    assert written(json.dumps(CHAT)) == written(CHAT)
    shared = [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]
    assert written(shared) == written(CHAT)
    assert written([{"role": "critic", "content": "w1"}]) == "<s> critic w1 w99"


def test_tools_are_objects() -> None:
    for tools in ("look", ["look"], {"name": "look"}):
        with pytest.raises(DamagedError, match="its tools are not a list of objects"):
            written(CHAT, tools)
    assert written(CHAT, []) == written(CHAT, "[]") == written(CHAT)


def test_contents_are_texts_or_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]}]
    assert written(parts) == "<s> w1\nw2 w99"
    assert written(parts, template=PARTS) == "w1\nw2 "
    assert written(CHAT, template=PARTS) == "w1 w2 w3 "  # a template that would write none of a text's letters


def test_calls_have_their_arguments_as_objects() -> None:
    for arguments in ({"at": 3}, '{"at": 3}'):
        assert written([*CHAT, call(arguments)]) == '<s> w1 w2 w3  look {"at": 3} w99'
    assert "tool 'look', and the chat template writes no calls" in damage([*CHAT, call({})], PLAIN)
    filled = [{"role": "user", "content": "w1", "tool_calls": None}, call({"at": 3, "of": None})]
    template = ChatTemplate(tokenizer_with())
    assert template.write(filled, null_filled=True).endswith('look {"at": 3} w99')
    assert template.write(filled).endswith('look {"at": 3, "of": null} w99')


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "holds no list of messages"),
        ("hello", "holds no list of messages"),
        ([{"role": "user"}], "message 0: the content is null"),
        ([*CHAT, {"role": "user", "content": None}], "message 2: the content is null"),
        ([{"role": "poet", "content": "w1"}], "message 0 has the role 'poet', which the chat template does not know"),
        ([{"role": None, "content": "w1"}], "role None"),
        ([{"content": "w1"}], "message 0 has no role"),
        ([3], "message 0 has no role"),
        ([{"role": "user", "content": 3}], "content is int, expected text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "a"}]}],
            "a part of the type 'image', which is not text",
        ),
        ([*CHAT, {"role": "system", "content": "w1"}], "refuses it: TemplateError: system is not first"),
        ([{**call({}), "tool_calls": 3}], "tool_calls is int, expected a list"),
        ([{**call({}), "tool_calls": [{"function": {}}]}], "a tool call has no name"),
    ],
)
def test_damaged_conversations(messages: Any, said: str) -> None:
    assert said in damage(messages)


@pytest.mark.parametrize("kind", ROWS)
def test_a_field_of_conversations_is_found(kind: str, tmp_path: Path) -> None:
    """Its first row may be damaged. A few damaged rows are left out and counted."""
    rows: list[dict[str, Any]] = [{"id": "a", "talk": CHAT, "tools": [TOOL]} for _ in range(40)]
    rows[1] = {"id": "a", "talk": [{"role": "user", "content": None}], "tools": [TOOL]}
    path, readings, tokenizer = write_rows(tmp_path / f"a{kind}", rows), list[Reading](), tokenizer_with()
    files = (str(path),)
    whole = [*read_documents(Text(files=files), tokenizer, readings)]
    assert whole == [written(CHAT, [TOOL])] * 39
    assert (readings[0].conversations, readings[0].documents, readings[0].refused) == (39, 39, 1)
    read = ReadText(tuple(readings), 3)
    assert read.extent() == "39 documents, 39 of them conversations, 1 others left out; 3 tokens read"
    first = f"{'line 2' if kind == '.jsonl' else 'item 1' if kind == '.json' else 'row 1'}: field 'talk'"
    assert f"1 damaged conversations are left out; the first: text file {path}, {first}" in read.left_out()[0]
    named = Text(files=files, messages="talk", template={"ending": "w7"})
    assert [*read_documents(named, tokenizer)] == [written(CHAT, [TOOL], ending="w7")] * 39


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("messages", [[], [{"content": "w1"}], "w1"])
def test_damage_of_messages_is_told_where_no_field_shows_conversations(
    kind: str, messages: Any, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / f"a{kind}", [{"id": 1, "messages": messages}] * 3)
    said = "message 0 has no role" if isinstance(messages, list) and messages else "holds no list of messages"
    with pytest.raises(InputError, match=f"field 'messages': {said}"):
        [*read_documents(Text(files=(str(path),)), tokenizer_with())]


def test_rows_that_are_lists_of_messages_are_named(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    with pytest.raises(
        InputError, match=r"line 1: a bare list of messages, expected an object \{\"messages\": \[…\]\}"
    ):
        [*read_documents(Text(files=(str(path),)), tokenizer_with())]


def test_conversations_without_contents_are_counted_as_empty(tmp_path: Path) -> None:
    """The template writes its own words for them. Nothing else is an error."""
    empty = [{"role": "user", "content": " "}, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]
    rows = [{"messages": messages} for messages in (CHAT, empty, [*empty, call({})])]
    readings: list[Reading] = []
    text = Text(files=(str(write_rows(tmp_path / "a.jsonl", rows)),))
    assert len([*read_documents(text, tokenizer_with(), readings)]) == 3
    assert (readings[0].documents, readings[0].conversations, readings[0].empty) == (3, 3, 1)
    write_rows(tmp_path / "a.jsonl", [{"messages": empty}] * 3)
    with pytest.raises(InputError, match="empty"):
        [*read_documents(text, tokenizer_with())]


@pytest.mark.parametrize("kind", ROWS)
def test_a_field_of_tools_that_no_row_has_is_refused(kind: str, tmp_path: Path) -> None:
    """One that some rows have is read, and they may be few."""
    rows: list[dict[str, Any]] = [{"messages": CHAT, "calls": [TOOL]}, {"messages": CHAT}]
    text = Text(files=(str(write_rows(tmp_path / f"a{kind}", rows)),), tools="calls")
    assert [*read_documents(text, tokenizer_with())] == [written(CHAT, [TOOL]), written(CHAT)]
    said = r"no row has the field 'call' of `tools` \(.*\); name one of 'messages', 'calls', or leave it out"
    with pytest.raises(InputError, match=said):
        [*read_documents(text.model_copy(update={"tools": "call"}), tokenizer_with())]


def test_a_field_of_tools_that_many_rows_lack_is_refused_before_all_are_read(tmp_path: Path) -> None:
    text = Text(files=(str(write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}] * (JUDGED_FROM + 5))),), tools="calls")
    documents = read_documents(text, tokenizer_with())
    assert len([*islice(documents, JUDGED_FROM - 1)]) == JUDGED_FROM - 1
    with pytest.raises(InputError, match="no row has the field 'calls'"):
        next(documents)


def test_tools_that_the_template_does_not_write(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": [TOOL]}] * 3)
    readings: list[Reading] = []
    text = Text(files=(str(path),))
    assert len([*read_documents(text, tokenizer_with(PLAIN), readings)]) == 3
    assert "does not write the tools of 3 conversations" in ReadText(tuple(readings)).left_out()[0]
    with pytest.raises(InputError, match="field 'tools' holds tools, and the chat template writes none; leave out"):
        [*read_documents(text.model_copy(update={"tools": "tools"}), tokenizer_with(PLAIN))]
    with pytest.raises(
        InputError, match=r"no field of conversations, for which .*; leave them out, or set .* to one of 'a'"
    ):
        [*read_documents(Text(files=(str(write_rows(path, [{"a": "b"}])),), tools="tools"), tokenizer_with())]
    (tmp_path / "a.txt").write_text("w1")
    with pytest.raises(InputError, match="plain text; conversations are read from"):
        [*read_documents(Text(files=(str(tmp_path / "a.txt"),), template={}), tokenizer_with())]


def test_arguments_that_the_template_does_not_have(tmp_path: Path) -> None:
    text = Text(files=(str(write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}])),), template={"endin": "w7"})
    with pytest.raises(InputError, match="line 1: template: the chat template has no argument endin; correct the name"):
        [*read_documents(text, tokenizer_with())]
    documents = text.model_copy(update={"template": {"ending": "w7", "documents": []}})
    assert [*read_documents(documents, tokenizer_with())] == ["<s> w1 w2 w3 w7"]


def test_many_damaged_conversations_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}] * 9 + [{"messages": [3]}])
    with pytest.raises(
        InputError, match=r"line 10: field 'messages': message 0 has no role; 1 of 10 rows hold no text"
    ):
        [*read_documents(Text(files=(str(path),), messages="messages"), tokenizer_with())]
    with pytest.raises(
        InputError, match="field 'messages' holds conversations, but the tokenizer has no chat template"
    ):
        [*read_documents(Text(files=(str(path),)), tokenizer_with(None))]


def test_windows_of_conversations_have_one_prefix_and_the_templates_end(tmp_path: Path) -> None:
    """Text between them ends with the tokenizer's EOS."""
    chats = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    mixed = (*read_documents(Text(files=(str(chats),)), tokenizer_with()), "w7 w8")
    one = [BOS, 3, 4, 5, 101]
    drawn = draw_samples([mixed], tokenizer_with(), 3, 0, 5, 0, prefix=(BOS,))
    assert drawn.samples.tolist() == [one] * 3
    assert (drawn.tokens, count_tokens(mixed, tokenizer_with(), 100)) == (18, 18)
    drawn = draw_samples([mixed], tokenizer_with(), 2, 0, 8, 0, prefix=(BOS,))
    assert drawn.samples.tolist() == [[*one, *one[:3]], [BOS, 5, 101, *one]]
    assert torch.equal(evaluation_ids(mixed, tokenizer_with()), torch.tensor([*one * 3, 9, 10]))
    assert EOS not in drawn.samples


def test_what_a_manifest_says_of_conversations() -> None:
    for fields, said in (
        ({"field": "a", "messages": "b"}, "field is for texts; messages, tools and template are for conversations"),
        ({"field": []}, r"field: \[\] should be different names"),
        ({"field": ["a", "a"]}, "should be different names"),
        ({"field": 3}, "field: should be text"),
        ({"field": ["a", 3]}, "field.1: should be text"),
        ({"template": {"tokenize": True}}, "template.tokenize: is not an argument of a chat template"),
        ({"template": "a"}, "template: should be a"),
    ):
        with pytest.raises(InputError, match=said):
            parse_block(Text, {"files": ["a.jsonl"], **fields}, "it")


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_templates_of_real_models(name: str) -> None:
    if not (models := os.environ.get("LAMINA_REAL_MODELS")):
        pytest.skip("no real models: LAMINA_REAL_MODELS, their folder, is not set")
    folder = Path(models, name)
    if not folder.is_dir():
        pytest.skip(f"no real model: {folder} is missing")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    template = ChatTemplate(tokenizer)
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "Hello!"}]
    plain: list[Any] = [{"role": "user", "content": "Hi"}, chat[1]]
    assert template.write(chat) == tokenizer.apply_chat_template(plain, tokenize=False)
    assert "<|im_start|>system\n" in template.write(chat)  # the template's own
    qwen = name.startswith("qwen")
    assert template.writes_tools == qwen
    if qwen:
        assert '{"name": "look", "arguments": {"at": 3}}' in template.write([*plain, call('{"at": 3}')], [TOOL])
