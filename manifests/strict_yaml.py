"""Read and write the YAML of manifests: plain data with one meaning.

Stricter than yaml.safe_load: `1e-6` is a number, a date is text, and duplicate keys, keys that are not text, aliases
(which can make a small file fill the memory) and tags are errors with their line.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

EXPONENT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")  # YAML 1.2; PyYAML wants 1.0e-6
FLOAT_TAG, TEXT_TAG, DATE_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("float", "str", "timestamp"))
FIRST_CHARACTERS = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Refuses aliases, tags, duplicate keys and keys that are not text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
        mark, tag = event.start_mark, getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, f"alias *{event.anchor}: write the value out", mark)
        if tag is not None:
            raise yaml.MarkedYAMLError(None, None, f"tag {tag}: only plain values are allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        key: Any
        for key, _ in node.value:
            if key.tag != TEXT_TAG:
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise yaml.MarkedYAMLError(None, None, f"key {shown}: a field's name must be text", key.start_mark)
            if key.value in keys:
                raise yaml.MarkedYAMLError(None, None, f"field {key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != DATE_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(FLOAT_TAG, EXPONENT, FIRST_CHARACTERS)
_Dumper.add_implicit_resolver(FLOAT_TAG, EXPONENT, FIRST_CHARACTERS)


def read_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError with the fault and its line."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: builds plain data only
    except RecursionError:
        raise ValueError("nested too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def write_yaml(document: Any) -> str:
    """Return YAML that `read_yaml` reads back equal. It is ASCII, as U+0085 would be read as a space."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
