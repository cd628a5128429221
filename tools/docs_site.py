"""Hooks of mkdocs: the site has the READMEs of the folders as pages, too, and reads code blocks as GitHub does.

`mkdocs.yml` names this file. Pages link to each other by their paths in the repository, so that the links work there;
here they become links between pages of the site.
"""

from __future__ import annotations

import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {  # path in the repository -> path on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "operating.md",
    "deploy/serving/README.md": "serving.md",
    "tools/README.md": "tools.md",
}
LINK = re.compile(r"(\]\()([^)\s:]+)(\))")
NAMED_FENCE = re.compile(r"^```(\w+) (\S+/\S+|\S+\.\w+)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Derives anchors from headings as GitHub does, and enables diagrams."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slugify(case="lower")}
    mermaid = {"name": "mermaid", "class": "mermaid", "format": _diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside of `docs/`."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between files of the repository, and the path after a code block's language."""
    own = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == own), f"docs/{own}")
    linked = LINK.sub(lambda match: match[1] + _on_the_site(match[2], source, own) + match[3], markdown)
    return NAMED_FENCE.sub(r'```\1 title="\2"', linked)


def _on_the_site(target: str, source: str, own: str) -> str:
    """Return the link to the repository's file `source` from the page `own`."""
    path, mark, anchor = target.partition("#")
    if not path:
        return target
    absolute = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = OUTSIDE.get(absolute, absolute.removeprefix("docs/"))
    return posixpath.relpath(page, posixpath.dirname(own) or ".") + mark + anchor


def _diagram(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Return a diagram as text, which the theme draws in the reader's browser."""
    return f'<pre class="{css_class}"><code>{escape(source)}</code></pre>'
