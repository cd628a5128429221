"""`verify`: the checks of a compressed checkpoint and their order.

Every check reads the files, a tensor or a layer at a time. A check that damage makes impossible is a fault as well,
never a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from manifests.errors import CorruptError, InputError, LaminaError
from pipeline.checkpoint.compression_record import (
    MODELLING_FILE,
    RECORD_FILE,
    file_fault,
    read_record,
    shard_record,
)
from pipeline.checkpoint.listing import listed_files
from pipeline.families.latent_config import latent_form
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.sources import open_dense
from pipeline.verification import output_checks, source_checks
from pipeline.verification.output_checks import Finding
from stores.checkpoint import verify_shard
from stores.json_files import read_object
from stores.model_files import CODE
from stores.source import CONFIG_FILE, INDEX_FILE
from stores.storage import Place, Storage, matching, on_this_machine, open_storage

__all__ = ["Finding", "verify"]


def verify(output: Place, source: str | None, bound: float | None = None) -> Iterator[Finding]:
    """Yield the finding of each check.

    Raises InputError if `output` is not a Lamina checkpoint or of another version, or `source` is not a model.
    """
    original, standard = open_dense(str(source)) if source is not None else (None, {})
    checked = open_storage(output)
    try:
        compression = read_record(checked)
    except (CorruptError, InputError) as error:
        if isinstance(error, InputError) and not checked.has(MODELLING_FILE):
            raise
        yield Finding("contract", "the other files cannot be compared with it", (str(error),))
        return
    yield Finding("contract", f"{RECORD_FILE}, version {compression['version']}, is undamaged")
    ours = read_object(checked, CONFIG_FILE) or {}  # the checks of files report a damaged one
    if original is not None and (fault := source_checks.other_model(original, standard, ours, compression)):
        yield Finding("source", "not compared", (fault,))
        original, standard = None, {}
    files = _files(checked, compression)
    yield files
    yield _guarded("digests", _digests, checked, compression)
    if any(name in fault for fault in files.faults for name in (CONFIG_FILE, INDEX_FILE)):
        yield Finding("contents", "not checked", (f"{checked.at()}: {CONFIG_FILE} or {INDEX_FILE} is damaged",))
        return
    try:
        checkpoint, config = read_checkpoint(checked.at())
        config = {**config, "dtype": checkpoint.config["dtype"]}
    except LaminaError as error:
        yield Finding("contents", "cannot be opened", (str(error),))
        return
    yield _guarded("contents", output_checks.check_output_files, checked, compression)
    yield _guarded("forms", output_checks.check_forms, checkpoint, config, compression)
    yield _guarded("values", output_checks.check_values, checkpoint, compression)
    yield _guarded("counts", output_checks.check_counts, checkpoint, config, compression, original, standard)
    if original is not None:
        pair = source_checks.SourceAndOutput(original, standard, checkpoint, config, compression)
        yield _guarded("source", source_checks.check_source, pair)
        yield _guarded("coverage", source_checks.check_coverage, pair)
        yield _guarded("logits", source_checks.check_logits, pair, bound)


def _guarded(check: str, function: Callable[..., Finding], *arguments: Any) -> Finding:
    """Run a check. An exception becomes a fault."""
    try:
        return function(*arguments)
    except Exception as error:  # a forged record may hold anything that its schema allows
        fault = str(error) if isinstance(error, LaminaError) else f"{type(error).__name__}: {error}"
        return Finding(check, "could not be finished", (fault,))


def _files(output: Storage, compression: Mapping[str, Any]) -> Finding:
    """Check every file but the shards, and that there are no others, which a loader might read."""
    faults = [file_fault(output, name, record) for name, record in sorted(compression["files"].items())]
    recorded = {RECORD_FILE, *compression["files"], *compression["shards"]}
    strangers = [name for name in listed_files(output) if name not in recorded]
    faults += [f"{output.at(name)}: not part of the checkpoint; remove it" for name in strangers]
    ordinary = latent_form(output_checks.recorded_forms(compression)) is not None
    needed = [CONFIG_FILE, INDEX_FILE, *([] if ordinary else _modelling_files(output))]
    faults += [f"{output.at(name)}: {RECORD_FILE} has no digest of it" for name in needed if name not in recorded]
    return Finding("files", f"{len(compression['files'])} files against sha256", tuple(filter(None, faults)))


def _modelling_files(output: Storage) -> list[str]:
    """List the modelling file and the files that it imports relatively, as a loader finds them."""
    try:
        with on_this_machine(output, partial(matching, patterns=CODE)) as folder:
            imported = get_relative_import_files(os.path.join(folder, MODELLING_FILE))
    except (OSError, ValueError):  # a file is missing or not text; the check of digests names it
        imported = []
    return [MODELLING_FILE, *sorted({PurePath(path).name for path in imported})]


def _digests(output: Storage, compression: Mapping[str, Any]) -> Finding:
    faults = []
    for shard, record in sorted(compression["shards"].items()):
        tensors = {name: entry for name, entry in compression["tensors"].items() if entry["shard"] == shard}
        try:
            verify_shard(output, shard, shard_record(record, tensors))
        except (CorruptError, InputError) as error:
            lost = f"; with it {', '.join(sorted(tensors))}" if tensors and not output.has(shard) else ""
            faults.append(f"{error}{lost}")
    return Finding("digests", f"{len(compression['shards'])} shards against sha256", tuple(faults))
