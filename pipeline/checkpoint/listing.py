"""The place of a checkpoint: its files by the names that the record gives them, and what killed writers left there."""

from __future__ import annotations

from lamina import MODELLING_FILES
from pipeline.checkpoint.compression_record import RECORD_FILE, read_record
from stores.durable import is_hidden
from stores.model_files import CONFIG_FILE, FOLDERS, INDEX_FILE, TOKENIZER_SETTINGS, companions
from stores.storage import Place, Storage, open_storage

CARD_FILE = "README.md"
OUR_FILES = frozenset({*MODELLING_FILES, CONFIG_FILE, CARD_FILE, RECORD_FILE, INDEX_FILE})  # and the shards


def listed_files(output: Storage) -> list[str]:
    """What lies in a checkpoint: files in the folders of companions by their paths, any other folder as one name.

    Hidden files are left out, and folders of companions that are empty.
    """
    folders = [folder for folder in FOLDERS if folder in output.folders()]
    names = [name for name in output.children() if name not in folders]
    inside = [name for folder in folders for name in output.names(folder)]
    return sorted(name for name in (*names, *inside) if not is_hidden(name.rpartition("/")[2]))


def sweep_halves(output: Storage) -> None:
    """Removes halves of files that killed writers left in a checkpoint; only while nobody writes there."""
    for place in (output, *(output.below(folder) for folder in FOLDERS)):
        place.sweep(below=False)


def companion_faults(output: Place, source: Storage, code: bool) -> list[str]:
    """Whether an undamaged checkpoint lacks companions of its source, or has others: since it was written, the source
    may have got some, or the manifest may trust Python that it did not trust before."""
    storage, wanted = open_storage(output), {*companions(source, code)} - OUR_FILES
    recorded = read_record(storage)["files"].keys() - OUR_FILES
    wanted |= recorded & {TOKENIZER_SETTINGS}  # written where the source has none
    missing = [f"{storage.at(name)}: missing; the source has it beside its weights" for name in wanted - recorded]
    return sorted(missing) + [f"{storage.at(name)}: not among the source's files" for name in sorted(recorded - wanted)]
