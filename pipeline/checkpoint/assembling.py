"""Assemble the committed layers as a checkpoint: shards, config, record, model card and index.

Order of durability: the index is renamed into OUTPUT last. A directory without an index is not a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lamina import MODELLING_FILES, modelling_source
from lamina.stored_lamina import FIELD, StoredFormat
from manifests import VERSION
from manifests.entries import HealedEntry, LayerEntry
from manifests.errors import CorruptError, InputError
from manifests.records import Scheme, ShardRecord, SourceFile
from pipeline.checkpoint.compression_record import (
    RECORD_FILE,
    RECORD_VERSION,
    describe_bytes,
    describe_file,
    encode_json,
    index_arguments,
    sealed,
)
from pipeline.checkpoint.counting import claimed_tensors, count_sizes
from pipeline.checkpoint.decoding_cost import decoding_costs
from pipeline.checkpoint.listing import CARD_FILE, OUR_FILES, sweep_halves
from pipeline.checkpoint.model_card import model_card
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import COMPARED, HEALED, layer_key, rest_key
from pipeline.families.latent_config import described_config, latent_paths, output_config, untied_head
from pipeline.families.wrapper import TOWERS, is_tower
from pipeline.inputs.checkpoints import linear_modules
from pipeline.inputs.job_inputs import Inputs
from pipeline.inputs.source_dtypes import FIELD as SOURCE_DTYPES
from pipeline.inputs.source_dtypes import unstored_dtypes
from pipeline.methods.registry import config_fields
from pipeline.rounding.schemes import WEIGHT, rounding_fields
from stores.checkpoint import (
    copy_shard,
    describe_shard,
    index_content,
    verify_shard,
    write_index,
)
from stores.corpus import tokenizer_class
from stores.formats import keeps
from stores.headers import read_header
from stores.model_files import TOKENIZER_SETTINGS, companions, copy_companions
from stores.source import CONFIG_FILE, INDEX_FILE
from stores.storage import Place, open_storage

SHARD_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ShardPlan:
    """The content of one output file: a staged layer, a whole source file, or some tensors of a source file.

    `copy_of`: a tensor's name -> its name in the source, if that differs.
    """

    name: str
    layer: int | None = None
    source_file: str | None = None
    tensors: tuple[str, ...] = ()
    whole: bool = False
    copy_of: Mapping[str, str] = field(default_factory=dict)


def plan_shards(inputs: Inputs) -> tuple[ShardPlan, ...]:
    """Plan a shard for each claimed layer, for the other tensors of each source file, and for an untied head."""
    layers, claimed = inputs.claimed_layers, claimed_tensors(inputs)
    prefixes = tuple(inputs.geometry.layers[layer].prefix for layer in layers)
    rest: dict[str, list[str]] = {}
    for name, record in inputs.source.tensors.items():
        if not name.startswith(prefixes) and name not in claimed:
            for each in record.stored if keeps(record) else (record,):
                rest.setdefault(each.file, []).append(each.name)
    head = untied_head(inputs.config, own_class(inputs))
    total = len(layers) + len(rest) + len(head)
    names = (shard_name(number, total) for number in range(1, total + 1))
    plans = [ShardPlan(next(names), layer=layer) for layer in layers]
    for file, tensors in sorted(rest.items()):
        whole = read_header(inputs.source.storage, file).keys() == {*tensors}
        plans.append(ShardPlan(next(names), source_file=file, tensors=tuple(sorted(tensors)), whole=whole))
    for name, embed in head.items():
        file = inputs.source.tensors[embed].file
        plans.append(ShardPlan(next(names), source_file=file, tensors=(name,), copy_of=head))
    return tuple(plans)


def own_class(inputs: Inputs) -> bool:
    """Return True if OUTPUT is an ordinary checkpoint, not of Lamina's class."""
    return any(method.own_class for method in inputs.methods)


def shard_name(number: int, total: int) -> str:
    """Return the file name of a shard, numbered from 1."""
    return f"model-{number:05d}-of-{total:05d}{SHARD_SUFFIX}"


class Assembler:
    """Writes OUTPUT from a finished journal. After an interruption, another run writes the same bytes."""

    def __init__(
        self,
        inputs: Inputs,
        journal: Journal,
        run_dir: Place,
        source_files: Mapping[str, SourceFile],
        guard: Callable[[], None] = lambda: None,
        output: Place | None = None,
    ) -> None:
        """`source_files`: by name. `guard`: raises if RUN_DIR is no longer ours or the source changed. `output`: a
        place other than OUTPUT."""
        self.guard = guard
        self.inputs = inputs
        self.journal = journal
        self.run_dir = open_storage(run_dir)
        self.source_files = source_files
        self.output = open_storage(output or inputs.manifest.output)

    def names(self) -> frozenset[str]:
        """Return the names of all files that `run` writes."""
        shards = (plan.name for plan in plan_shards(self.inputs))
        return OUR_FILES.union(shards, self._companions())

    def run(self, replaceable: Set[str] = frozenset()) -> dict[str, Any]:
        """Write everything, the index last. Return the compression record.

        `replaceable`: files of earlier work in OUTPUT. They are removed if they are not written again. Staged layers
        are not verified here: see `LayerChecks`. Raises CorruptError when the ledger has lost an entry.
        """
        plans = plan_shards(self.inputs)
        self._remove_index(replaceable)
        records = {plan.name: self._place(plan) for plan in plans}
        self.output.sync(records)
        compression = self._record(plans, records)
        names = self._write_companions()
        self.output.replace(CONFIG_FILE, encode_json(config := self._config(compression["tensors"])))
        self.output.replace(CARD_FILE, model_card(compression, config).encode())
        described = {name: describe_file(self.output, name) for name in (*names, CONFIG_FILE, CARD_FILE)}
        index = index_arguments(compression)
        described[INDEX_FILE] = describe_bytes(index_content(*index))
        compression = sealed({**compression, "files": described})
        self.output.delete(sorted(replaceable - {*described, *records, RECORD_FILE}))
        self.output.replace(RECORD_FILE, encode_json(compression))
        self.guard()
        write_index(self.output, *index)
        return compression

    def _remove_index(self, replaceable: Set[str]) -> None:
        """Remove the index, so that OUTPUT is not a checkpoint for now, then old shards without a new version."""
        self.output.delete([INDEX_FILE])
        sweep_halves(self.output)
        self.output.delete(sorted(name for name in replaceable - self.names() if name.endswith(SHARD_SUFFIX)))

    def _place(self, plan: ShardPlan) -> ShardRecord:
        if plan.layer is not None:
            entry = self._entry(plan.layer)
            assert entry is not None
            self.output.link_or_copy(plan.name, self.run_dir, entry.staged.path)
            return entry.staged
        key = rest_key(plan.name.removesuffix(SHARD_SUFFIX))
        committed = self.journal.get(key)
        if committed is not None and self._is_whole(plan.name, committed):
            return committed
        assert plan.source_file is not None
        if plan.whole:
            self.output.link_or_copy(plan.name, self.inputs.source.storage, plan.source_file)
            record = describe_shard(self.output, plan.name)
        else:
            record = copy_shard(self.output, plan.name, self.inputs.source, plan.tensors, plan.copy_of)
        self.journal.commit(key, record)
        return record

    def _forms(self) -> list[dict[str, Any]]:
        """Return the forms of every layer by role, as in config.json."""
        return [self._layer_report(layer)["forms"] for layer in range(self.inputs.geometry.num_layers)]

    def _entry(self, layer: int) -> LayerEntry | None:
        """Return the ledger entry of a layer, or None if no task claims it. Raises CorruptError if it is lost."""
        entry = self.journal.get(layer_key(layer))
        if entry is None and layer in self.inputs.claimed_layers:
            raise CorruptError(
                f"{self.run_dir.at()}: the ledger no longer holds layer {layer}; was a mount lost? Mount it again, "
                "then run the same command again",
                f"layer/{layer:05d}",
            )
        return entry

    def _config(self, stored: Collection[str]) -> dict[str, Any]:
        config = output_config(self.inputs.config, self._forms(), self.inputs.dtype_name)
        if own_class(self.inputs):
            return config
        rounded, fields = self._rounded(), dict[str, Any]()
        if rounded:
            towers = [TOWERS] if config.get("wrapper") else []
            fields |= rounding_fields(rounded, [*linear_modules(config), *towers])
        if kept := self._kept(stored, rounded):
            fields[FIELD] = kept
        if unused := self._unused(config):
            fields["unused_tensors"] = unused
        source = self.inputs.source.tensors
        if dtypes := unstored_dtypes(claimed_tensors(self.inputs), source, stored, self.inputs.dtype_name):
            fields[SOURCE_DTYPES] = dtypes
        return config | config_fields(self.inputs.methods) | fields

    def _rounded(self) -> dict[str, Scheme]:
        """Return the scheme of each rounded module by its path."""
        entries = map(self._entry, range(self.inputs.geometry.num_layers))
        return {path: scheme for entry in entries if entry for path, scheme in entry.rounded.items()}

    def _kept(self, stored: Collection[str], rounded: Mapping[str, Scheme]) -> list[dict[str, Any]]:
        """Return `stored_formats`: the modules whose weights are stored as in the source, by their format."""
        modules: dict[StoredFormat, list[str]] = {}
        for name, record in self.inputs.source.tensors.items():
            path = name.removesuffix(WEIGHT)
            parts = {part.name for part in record.stored}
            if record.form is not None and keeps(record) and path not in rounded and parts <= {*stored}:
                modules.setdefault(record.form, []).append(path)
        return [{**form.described, "modules": sorted(paths)} for form, paths in modules.items()]

    def _unused(self, config: Mapping[str, Any]) -> list[str]:
        """Return the source's tensors that its model does not use, so that loading accepts them."""
        used = {*self.inputs.geometry.expected_tensors(), f"{config['block']['head']}.weight"}
        unused = self.inputs.source.tensors.keys() - used
        return sorted(name for name in unused if not (config.get("wrapper") and is_tower(name)))

    def _record(self, plans: Sequence[ShardPlan], records: Mapping[str, ShardRecord]) -> dict[str, Any]:
        geometry, forms = self.inputs.geometry, self._forms()
        owners = {(task.layer, role): task for task in self.inputs.tasks for role in task.roles}
        healed = self._healed()
        trained = {*healed.trained} if healed else set()
        tensors: dict[str, Any] = {}
        for plan in plans:
            role_paths = {} if plan.layer is None else self._role_paths(plan.layer, forms[plan.layer])
            for name, described in records[plan.name].tensors.items():
                role = next((role for path, role in role_paths.items() if name.startswith(path)), None)
                task = None if plan.layer is None or role is None else owners.get((plan.layer, role))
                form = None if plan.layer is None or role is None else forms[plan.layer].get(role)
                origin = self.inputs.methods[task.method].name if task else "copied"
                stored = {"origin": origin, "shard": plan.name, **({"healed": True} if name in trained else {})}
                tensors[name] = {**described.as_json(), **(form or {"form": "dense"}), **stored}
        return {
            "version": RECORD_VERSION,
            "code_version": VERSION,
            "source": {
                "path": self.inputs.manifest.model.source,
                "revision": self.inputs.manifest.model.revision,
                "model_type": geometry.model_type,
                "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.source_files.items()},
                **({"left_out": list(left_out)} if (left_out := self.inputs.source.left_out) else {}),
            },
            "manifest": self.inputs.manifest.semantic(),
            "counts": count_sizes(self.inputs, tensors, forms, self._rounded()),
            "decoding": decoding_costs(described_config(self.inputs.config, forms), self.inputs.config),
            "layers": [self._layer_report(layer) for layer in range(geometry.num_layers)],
            "compared": compared.compared.as_json() if (compared := self.journal.get(COMPARED)) else None,
            **({"healed": dict(healed.figures)} if healed else {}),
            "shards": {name: {"size": record.size, "sha256": record.sha256} for name, record in records.items()},
            "claimed": claimed_tensors(self.inputs),
            "tensors": tensors,
        }

    def _healed(self) -> HealedEntry | None:
        """Return the healing whose layers these are; None if they are those of the solve."""
        entry = self.journal.get(HEALED)
        layers = range(self.inputs.geometry.num_layers)
        staged = {str(layer): entered.staged for layer in layers if (entered := self._entry(layer))}
        return entry if entry and entry.layers and {**staged, **entry.layers} == staged else None

    def _role_paths(self, layer: int, forms: Mapping[str, Any]) -> dict[str, str]:
        """Map module paths, with a trailing dot, to roles, the longest first, because modules may be nested.

        Modules of a group belong to its first role.
        """
        geometry = self.inputs.geometry.layers[layer]
        tasks = [task for task in self.inputs.tasks if task.layer == layer]
        paths = {f"{geometry.path(role)}.": role for task in tasks for role in (*geometry.roles, *task.roles)}
        for task in tasks:
            first = task.roles[0]
            if first in forms:
                shared = geometry.group_path(task.roles, task.name)
                paths.setdefault(f"{shared}.{forms[first]['form']}.", first)
        paths |= latent_paths(geometry, forms)
        for role, form in forms.items():
            if form["form"] == "pivoted":
                paths.setdefault(f"{geometry.group_path((role,), form['group'])}.pivoted.", role)
        return dict(sorted(paths.items(), key=lambda item: -len(item[0])))

    def _layer_report(self, layer: int) -> dict[str, Any]:
        entry = self._entry(layer)
        report = entry.as_json() if entry else {}
        fields = {field: report.get(field, {}) for field in ("groups", "forms")}
        return {**fields, "refined": report["refined"]} if "refined" in report else fields

    def _companions(self) -> list[str]:
        """Return the files that are copied beside the weights, and tokenizer settings even if the source has none."""
        names = {*companions(self.inputs.source.storage, self._trusted)}
        return sorted((names | {TOKENIZER_SETTINGS} if self._tokenizer_class else names) - OUR_FILES)

    @cached_property
    def _tokenizer_class(self) -> str | None:
        return tokenizer_class(self.inputs.source.storage, self._trusted)

    @property
    def _trusted(self) -> bool:
        return self.inputs.manifest.model.trust_remote_code

    def _write_companions(self) -> list[str]:
        """Copy the companions, and the modelling files unless OUTPUT needs none. Return their names."""
        source, trusted = self.inputs.source.storage, self._trusted
        names = copy_companions(self.output, source, trusted, OUR_FILES, self._tokenizer_class)
        files = () if own_class(self.inputs) else MODELLING_FILES
        for name in files:
            self.output.replace(name, modelling_source(name))
        return [*names, *files]

    def _is_whole(self, name: str, record: ShardRecord) -> bool:
        try:
            verify_shard(self.output, name, record)
        except (CorruptError, InputError):
            return False
        return True
