"""docs/troubleshooting.md: every message that it quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OTHERS = {  # messages of the system, of transformers and of vLLM
    "Illegal instruction",
    "pip install compressed-tensors",
    "Unsupported CPU attention configuration",
    "No package metadata was found for vllm",
    "strides should be multiple of 16 bytes",
    "The tokenizer you are loading … with an incorrect regex pattern … fix_mistral_regex=True",
}


def _quoted() -> list[str]:
    """The messages in the first columns of the tables; one with backticks in it stands between two of them."""
    rows = re.findall(r"^\| (`.*?`)(?: \(from .*?\)| \(transformers.*?\)| in a worker's log)? \| ", PAGE, re.MULTILINE)
    return [row[2:-2].strip() if row.startswith("``") else row[1:-1] for row in rows]


def _messages() -> Iterator[str]:
    """All strings of the code, with `…` in place of what is filled in."""
    for folder in ("manifests", "pipeline", "stores", "workers", "deploy/serving/lamina"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return list(_messages())


def test_the_page_quotes_messages() -> None:
    assert len(_quoted()) > 60


@pytest.mark.parametrize("message", sorted({*_quoted()} - OTHERS))
def test_the_code_says_it(message: str, messages: list[str]) -> None:
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" ;:.()")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in messages), message
