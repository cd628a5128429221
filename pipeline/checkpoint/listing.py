"""Lists the files of a checkpoint's directory, and removes partial files of killed writers."""

from __future__ import annotations

from lamina import MODELLING_FILES
from pipeline.checkpoint.compression_record import RECORD_FILE, read_record
from stores.durable import is_hidden
from stores.model_files import CONFIG_FILE, FOLDERS, INDEX_FILE, TOKENIZER_SETTINGS, companions
from stores.storage import Place, Storage, open_storage

CARD_FILE = "README.md"
OUR_FILES = frozenset({*MODELLING_FILES, CONFIG_FILE, CARD_FILE, RECORD_FILE, INDEX_FILE})  # and the shards


def listed_files(output: Storage) -> list[str]:
    """List a checkpoint's directory: files in folders of companions by path, other folders by name.

    Hidden files and empty folders of companions are left out.
    """
    folders = [folder for folder in FOLDERS if folder in output.folders()]
    names = [name for name in output.children() if name not in folders]
    inside = [name for folder in folders for name in output.names(folder)]
    return sorted(name for name in (*names, *inside) if not is_hidden(name.rpartition("/")[2]))


def sweep_halves(output: Storage) -> None:
    """Remove the partial files of killed writers. No writer may be active."""
    for place in (output, *(output.below(folder) for folder in FOLDERS)):
        place.sweep(below=False)


def companion_faults(output: Place, source: Storage, code: bool) -> list[str]:
    """Return the source's companions that an undamaged checkpoint lacks, and the checkpoint's that the source lacks.

    They differ if files were added to the source later, or if the manifest did not trust its Python files before.
    """
    storage, expected = open_storage(output), {*companions(source, code)} - OUR_FILES
    recorded = read_record(storage)["files"].keys() - OUR_FILES
    expected |= recorded & {TOKENIZER_SETTINGS}  # written even if the source has none
    missing = [f"{storage.at(name)}: missing; the source has it beside its weights" for name in expected - recorded]
    return sorted(missing) + [
        f"{storage.at(name)}: not among the source's files" for name in sorted(recorded - expected)
    ]
