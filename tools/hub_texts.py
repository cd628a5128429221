"""Write the texts of `make real` from the hub: `python -m tools.hub_texts FOLDER`.

Passages of WikiText-103 (train) for calibration, WikiText-2's raw test text and documents of C4 (validation) to score.
A text that is there is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from tools.real import OTHER, PASSAGES, TEST

COUNT = 1000  # passages, or documents
LEAST = 400  # characters of a passage


def rows(dataset: str, name: str, split: str) -> Iterator[str]:
    """Yield the texts of a dataset's rows in order."""
    import datasets

    for row in datasets.load_dataset(dataset, name, split=split, streaming=True):
        yield row["text"]


def passages() -> str:
    """Return a JSON list of long paragraphs of WikiText-103."""
    long = (text for text in rows("Salesforce/wikitext", "wikitext-103-raw-v1", "train") if len(text) >= LEAST)
    return json.dumps([*islice(long, COUNT)], ensure_ascii=False, indent=0)


def test_text() -> str:
    """Return the test text of WikiText-2."""
    return "".join(rows("Salesforce/wikitext", "wikitext-2-raw-v1", "test"))


def documents() -> str:
    """Return documents of C4, one a line."""
    first = islice(rows("allenai/c4", "en", "validation"), COUNT)
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in first)


TEXTS: dict[str, Callable[[], str]] = {PASSAGES: passages, TEST: test_text, OTHER: documents}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the texts that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        path, part = folder / name, folder / f"{name}.part"
        if not path.exists():
            part.write_text(text(), encoding="utf-8")
            part.rename(path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
