"""Write docs/manifest.md from the pydantic schema: every block and field, its type, default and limits.

python -m tools.manifest_reference [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from manifests.method_entry import MethodEntry
from manifests.schema import Manifest
from manifests.sweep import Sweep

PAGE = Path(__file__).resolve().parents[1] / "docs" / "manifest.md"
INTRODUCTION = """\
# The manifest

<!-- Written by `python -m tools.manifest_reference`; change manifests/*.py instead. -->

This page lists every field of a manifest, the YAML file that describes a job. It is read strictly: unknown fields,
numbers in quotes and duplicate keys are errors, and all errors are reported at once. Relative paths are relative to the
working directory. `${NAME}` is replaced only if NAME is listed under `environment`. The option `--set FIELD=VALUE` of a
command overrides a field (`--set budget.keep=0.7`, `--set methods.0.keep=0.5`).
"""
NAMES = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
SIGNS: tuple[tuple[type, str, str], ...] = ((Gt, "gt", "> "), (Ge, "ge", "≥ "), (Lt, "lt", "< "), (Le, "le", "≤ "))


def reference() -> str:
    """Return the whole page, as Markdown."""
    models = dict.fromkeys([*_reachable(Manifest), *_reachable(Sweep)])
    sections = [_section(model) for model in models]
    return "\n".join([INTRODUCTION, *sections])


def _reachable(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a block and the blocks of its fields, each once, in the order of the fields."""
    pending, visited = [model], {model}
    while pending:
        current = pending.pop(0)
        yield current
        inner = [block for field in current.model_fields.values() for block in _blocks(field.annotation)]
        inner = [MethodEntry, *inner] if any(map(_is_method, inner)) else inner
        new = [block for block in dict.fromkeys(inner) if block not in visited]
        visited.update(new)
        pending = [*new, *pending]


def _blocks(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in _blocks(argument)]


def _section(model: type[BaseModel]) -> str:
    shared = MethodEntry.model_fields if _is_method(model) else {}
    rows = [_row(name, field) for name, field in model.model_fields.items() if name not in shared]
    besides = [f"Besides, the fields of {_link(MethodEntry)}.", ""] if shared else []
    table = ["| field | value | default |", "|---|---|---|", *rows]
    text = (model.__doc__ or "").strip().replace("\n    ", "\n")
    text = re.sub(r"\bdocs/([\w-]+\.md(?:#[\w-]+)?)", r"[\1](\1)", text)
    return "\n".join([f"## {_title(model)}", "", text, "", *besides, *table, ""])


def _is_method(model: type[BaseModel]) -> bool:
    return issubclass(model, MethodEntry) and model is not MethodEntry


def _title(model: type[BaseModel]) -> str:
    """Return `method: NAME` for a method's entry, else the name of the block."""
    return f"method: {get_args(model.model_fields['method'].annotation)[0]}" if _is_method(model) else model.__name__


def _link(model: type[BaseModel]) -> str:
    return f"[{_title(model)}](#{_title(model).lower().replace(': ', '-')})"


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_type(field.annotation, field.metadata)} | {_default(field)} |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower().replace('none', 'null')}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*metadata, *_unfolded(arguments[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument, metadata) for argument in arguments)
    if origin is Mapping:
        return "names and values"
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        listed = _type(items[0], []) if len(set(items)) == 1 else ", ".join(_type(item, []) for item in items)
        count = "" if Ellipsis in arguments else f" of {len(items)}"
        return f"list{count}: {listed}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _link(annotation)
    if annotation is type(None):
        return "`null`"
    bounds = ((limit, name, sign) for kind, name, sign in SIGNS for limit in metadata if isinstance(limit, kind))
    limits = ", ".join(f"{sign}{getattr(limit, name):,}" for limit, name, sign in bounds)
    return f"{NAMES[annotation]} ({limits})" if limits else NAMES[annotation]


def _unfolded(metadata: tuple[Any, ...]) -> list[Any]:
    """Return limits that pydantic packs into a `Field`."""
    return [limit for item in metadata for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check that it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m tools.manifest_reference", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    page = reference()
    if not parser.parse_args(argv).check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE}: out of date with the schema in manifests/; run python -m tools.manifest_reference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
