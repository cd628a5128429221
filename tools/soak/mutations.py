"""Hostile changes to bytes, JSON and YAML, drawn from a `random.Random`: equal seeds give equal changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import yaml

DEEP = 3000
Keys = tuple[Any, ...]


def nested(depth: int) -> Any:
    """Return a list within a list, and so on, `depth` times."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**31 - 1, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.0, 0.5,
    1.0, -0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf"), "", " ", "\0", "a\0b", "\n",
    "\x1b[31m\x07", "‮evil", "é" * 50, "😀", "x" * 70_000, "../../outside", "/nowhere/at/all", "/", ".", "..", "~",
    "${HOME}", "$(touch x)", "%s%n", "-1", "1", "1e999", "nan", "null", "s3://bucket/x", "file:///nowhere", [], {},
    [[]], [None], {"": {}}, {"a": 1}, [1, "a", {}], list(range(5000)), {str(n): n for n in range(2000)}, nested(40),
    "a" * 200,
)  # fmt: skip
RAW = (
    '"\\ud800"', '"a\\udfff"', "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-0", "1E400", "[" * DEEP,
    "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "0x10", "'a'", "undefined", '"unended', "01",
)  # fmt: skip


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Change bytes one to three times: a bit, a slice, inserted junk, a cut, an end."""
    mutable = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(mutable) + 1)
        length = min(rng.choice((1, 2, 8, 64, 1024)), len(mutable) - at)
        match rng.randrange(9):
            case 0 | 1 if mutable:
                mutable[at % len(mutable)] ^= 1 << rng.randrange(8)
            case 2:
                del mutable[at : at + length]
            case 3:
                del mutable[at:]
            case 4:
                mutable[at:at] = rng.randbytes(rng.choice((1, 3, 16, 300)))
            case 5:
                mutable[at:at] = mutable[at : at + length] * rng.choice((1, 2, 50))
            case 6:
                mutable[at:at] = rng.choice(
                    (b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r", b"\t", b"\x1b[2J", b"\xc3\x28", b"{", b"]",
                     b'"', b": ", b"- ", b"&a ", b"*a", b"!!python/object/apply:os.system [id]", b"\xe2\x80\xa8")
                )  # fmt: skip
            case 7:
                mutable[at : at + length] = bytes(length)
            case 8:
                other = rng.randrange(len(mutable) + 1)
                mutable[at : at + length] = mutable[other : other + length]
    return bytes(mutable)


def mutate_tree(value: Any, rng: Random, hostile: tuple[Any, ...] = HOSTILE) -> Any:
    """Change a tree of dicts and lists once or twice: replace, remove, rename, add, wrap or scale a value."""
    tree = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2))):
        paths = list(_paths(tree))
        if not paths:
            return copy.deepcopy(rng.choice(hostile))
        *parents, last = rng.choice(paths)
        owner = tree
        for part in parents:
            owner = owner[part]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                owner[last] = copy.deepcopy(rng.choice(hostile))
            case 5:
                del owner[last]
            case 6 if isinstance(owner, dict):
                owner[rng.choice(("", "x", "../x", "a\0", str(last).upper(), f"{last} ", "y" * 5000))] = owner.pop(last)
            case 7 if isinstance(owner, dict):
                name = rng.choice(("unknown", "__class__", "__proto__", "auto_map", "version", ""))
                owner[name] = copy.deepcopy(rng.choice(hostile))
            case 8:
                owner[last] = rng.choice(([owner[last]], {"a": owner[last]}, [owner[last]] * 3))
            case 9:
                owner[last] = _scaled(owner[last], rng)
            case _:
                owner[last] = copy.deepcopy(rng.choice(hostile))
    return tree


def _scaled(value: Any, rng: Random) -> Any:
    """Return a value near another."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        changed = (value + 1, value - 1, value * 2, -value, value * 1000, value * 10**12, float(value), value // 2)
        return rng.choice(changed)
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), value * 2, " " + value, value + "\n", "../" + value))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1]))
    return None


def _paths(value: Any, prefix: Keys = ()) -> Iterator[Keys]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*prefix, key)
        yield from _paths(child, (*prefix, key))


def mutate_json(text: bytes, rng: Random) -> bytes:
    """Change a JSON document as bytes, as a tree, or by text that no encoder writes."""
    kind = rng.randrange(10)
    if kind < 2:
        return mutate_bytes(text, rng)
    if kind == 2:
        whole = (b"", b"null", b"[]", b"{}", b"1", b'"x"', text + text, b"\xef\xbb\xbf" + text, b"\0" * 100)
        return rng.choice(whole)
    document = json.loads(text)
    if kind == 3:
        marker = "\0raw\0"
        tree = mutate_tree(document, rng, (marker,))
        return json.dumps(tree).replace(json.dumps(marker), rng.choice(RAW)).encode()
    if kind == 4:  # the first key of an object twice
        encoded = json.dumps(document)
        at = rng.choice([n for n, character in enumerate(encoded) if character == "{"] or [0])
        end = encoded.find(",", at)
        return (encoded[:end] + "," + encoded[at + 1 : end] + encoded[end:]).encode() if end > at else b"{,}"
    return json.dumps(mutate_tree(document, rng, HOSTILE), ensure_ascii=rng.random() < 0.5).encode()


YAML_TEXTS = (
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]\n",
    "<<: {version: 1}\n", "? [a, b]\n: 1\n", "? {a: 1}\n: 1\n", "1: 2\n", "null: 1\n", "true: 1\n", "2026-01-01: 1\n",
    "x: !!python/object/apply:os.system ['touch pwned']\n", "x: !!python/name:os.system\n", "x: !!binary aGk=\n",
    "x: !!set {a, b}\n", "x: !!timestamp 2026-01-01\n", "%TAG ! tag:x,2000:\n---\n", "--- a\n--- b\n", "...\n",
    "x: " + "[" * 2000 + "\n", "x: " + "[" * 900 + "]" * 900 + "\n", "x: " + "{a: " * 500 + "1" + "}" * 500 + "\n",
    "x: |\n" + " y\n" * 20_000, "x: '" + "z" * 200_000 + "'\n", "# " + "c" * 300_000 + "\n", "\t\n", "x: \x07\n",
    "version: 1\n", "x: 0o17\n", "x: 1_000\n", "x: 1:30:00\n", "x: .inf\n", "x: .nan\n", "x: " + "9" * 5000 + "\n",
    "x: \"\\ud800\"\n", "x: \"\\0\"\n", "x: \"\\U0010ffff\"\n", "environment: [HOME, PATH, NO_SUCH_VARIABLE]\n",
    "environment: HOME\n", "environment: [1, {}]\n",
)  # fmt: skip


def mutate_yaml(text: bytes, rng: Random) -> bytes:
    """Change a YAML document as bytes, as a tree, or by hostile lines."""
    kind = rng.randrange(10)
    if kind < 3:
        return mutate_bytes(text, rng)
    if kind < 5:
        lines = text.decode().splitlines(keepends=True)
        lines.insert(rng.choice((0, len(lines), rng.randrange(len(lines)))), rng.choice(YAML_TEXTS))
        return "".join(lines).encode("utf-8", "surrogatepass")
    document = mutate_tree(yaml.safe_load(text), rng)
    try:
        return yaml.safe_dump(document, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, ValueError):  # an integer too long to be written
        return mutate_bytes(text, rng)
