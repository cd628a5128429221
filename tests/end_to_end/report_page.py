"""Parses a report like a browser: elements, tables, plots."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """A parsed page. Fails on elements that are not closed, or not in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.content = content
        self.open: list[str] = []
        self.ids: list[str] = []
        self.classes: set[str] = set()
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.captions: list[str] = []
        self.text = ""
        self._table: list[list[str]] | None = None
        self.feed(content)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if identifier := attributes.get("id"):
            self.ids.append(identifier)
        self.classes |= set((attributes.get("class") or "").split())
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "srcset", "action")
        ]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for _, value in attrs))
        if tag == "table":
            self._table = self.tables.setdefault(attributes["id"] or "", [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
        elif tag == "figcaption":
            self.captions.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> of nothing"
        assert self.open.pop() == tag, f"</{tag}> in {self.open} at {self.getpos()}"
        if tag == "table":
            self._table = None

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if self._table is not None and self.open[-1] in ("td", "th"):
            self._table[-1][-1] += data
        if "figcaption" in self.open:
            self.captions[-1] += data

    def column(self, table: str, heading: str) -> list[str]:
        """Return the cells below a heading."""
        place = self.tables[table][0].index(heading)
        return [row[place] for row in self.tables[table][1:]]

    def row(self, table: str, first: str) -> list[str]:
        """Return the cells after the first one of a row."""
        return next(row[1:] for row in self.tables[table] if row[0] == first)
