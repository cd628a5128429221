"""Runs a worker in this process on a small model, and transformers' model of the same weights as a reference.

L layers, M samples, S sequence, D hidden, F features.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from manifests.records import StagedLayer
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.units.sums import SUMMED, ChooseGrids, Collect, Summed, Sums, Total
from pipeline.units.units import Backward, Forward, Reduce, Solve, SolveDone, Summable, Write
from stores.activations import ActivationStore
from stores.source import open_source
from tests.families.geometries import manifest
from tests.serving.serving_sources import make_source
from workers.config import WorkerConfig
from workers.tensor_transfer import LocalTransfer
from workers.worker import Worker

SAMPLES, SEQUENCE = 5, 9
LOW = {"value": 5, "mlp": 33, "query_key": 4}
EVERYTHING = {"query_key": "head_pca"}
FAMILIES = ("llama-gqa", "mistral-window", "qwen2-tied", "qwen3", "opt-tied", "gptj", "gemma2-tied", "olmo3")


def save_source(
    directory: Path, name: str = "llama-gqa", dtype: torch.dtype = torch.float32, shard_size: str = "60KB"
) -> Path:
    """Save a random model of a family in several shards."""
    make_source(name).to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    return directory


def make_setup(model: Path, run_dir: Path, *methods: dict[str, Any], **changes: Any) -> WorkerConfig:
    """Store tokens, and return the settings of a worker. `methods`: entries of a manifest."""
    source = open_source(str(model))
    config = standard_config(source.config)
    geometry = geometry_of(config)
    (run_dir / "staged").mkdir(parents=True, exist_ok=True)
    ids = torch.randint(3, geometry.vocab, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(5))
    given: dict[str, Any] = {
        "shards": 2,
        "micro_batch": 2,
        "dtype": torch.float32,
        "threads": 1,
        "use_gpu": False,
        "hidden_bytes": 2**30,
        "manifest": manifest(*methods) if methods else None,
        "tokens": ActivationStore(run_dir / "activations.zarr").write_tokens(ids.to(torch.int32)),
        **changes,
    }
    return WorkerConfig(source=source, config=config, geometry=geometry, run_dir=run_dir, **given)


def make_worker(setup: WorkerConfig) -> Worker:
    return Worker(setup, LocalTransfer())


def layer_names(setup: WorkerConfig, layer: int) -> list[str]:
    """Return the names of a dense layer's tensors."""
    return [name for name, _ in setup.geometry.layers[layer].tensors().values()]


def tasks_of(setup: WorkerConfig, layer: int) -> list[Task]:
    assert setup.manifest is not None
    tasks = claim_tasks(build_methods(setup.manifest), setup.geometry)
    return [task for task in tasks if task.layer == layer]


class Reference:
    """The values in transformers' model, which runs once on all samples."""

    def __init__(self, model: Path, setup: WorkerConfig) -> None:
        self.setup = setup
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=setup.dtype).eval()
        store = ActivationStore(setup.run_dir / "activations.zarr")
        assert setup.tokens is not None
        self.ids_MS = store.open(setup.tokens).read(0, SAMPLES).long()
        self.layers = list(self.model.get_submodule(setup.geometry.layers_path))
        self.hidden_LMSD: list[Tensor] = []  # inputs of layer l; one more: the output of the last
        with contextlib.ExitStack() as hooks, torch.no_grad():
            for layer in self.layers:
                hooks.enter_context(hooked(layer.register_forward_pre_hook(self._see_input, with_kwargs=True)))
            hooks.enter_context(hooked(self.layers[-1].register_forward_hook(self._see_output)))
            self.logits_MSV = self.model(self.ids_MS, use_cache=False).logits

    def _see_input(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        self.hidden_LMSD.append(hidden.detach().clone())

    def _see_output(self, _: nn.Module, __: Any, result: Any) -> None:
        self.hidden_LMSD.append((result[0] if isinstance(result, tuple) else result).detach().clone())

    def module(self, layer: int, role: str) -> nn.Module:
        found: nn.Module = self.model.get_submodule(self.setup.geometry.layers[layer].path(role))
        return found

    def at(self, layer: int, point: str) -> Tensor:
        """Return the values (M, S, F) at a point of a layer, of all samples."""
        role, _, side = point.partition(".")
        seen: list[Tensor] = []

        def see(_: nn.Module, arguments: tuple[Tensor, ...], *result: Tensor) -> None:
            seen.append(result[0] if result else arguments[0])

        module = self.module(layer, role)
        handle = module.register_forward_pre_hook(see) if side == "in" else module.register_forward_hook(see)
        with hooked(handle), torch.no_grad():
            self.model(self.ids_MS, use_cache=False)
        return seen[0].reshape(SAMPLES, SEQUENCE, -1)

    def shard(self, values_M: Tensor, shard: int) -> Tensor:
        start, stop = self.setup.sample_range(shard)
        return values_M[start:stop]


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


def rewrite(model: Path, copy: Path, name: str, change: Any) -> Path:
    """Copy a checkpoint, with one tensor changed in place."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, copy)
    source = open_source(str(copy))
    file = copy / source.tensors[name].file
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def held(worker: Worker, lineage: str, layer: int, shard: int) -> Tensor:
    slices = worker.hidden.get((lineage, layer, shard))
    assert slices is not None
    start, stop = worker.setup.sample_range(shard)
    return slices.read(0, stop - start)


def solve_layer(worker: Worker, layer: int, ranks: dict[str, int]) -> tuple[StagedLayer, dict[str, Any]]:
    """Run all units that compress a layer.

    Return the staged record, as the driver passes it on, and the groups' reports.
    """
    solved, reports = [], {}
    for task in tasks_of(worker.setup, layer):
        records = sum_layer(layer, task.moments, [worker, worker])
        found = worker.execute(Solve(task, ranks, records))
        solved.append(found)
        reports[task.name] = found.report
    unit = write_unit(worker.setup, layer, solved)
    return StagedLayer(**dict(worker.execute(unit)), forms=unit.forms), reports


def sum_layer(layer: int, moments: Sequence[Moment], holders: Sequence[Worker]) -> dict[Moment, Any]:
    """Return records of the moments of a dense layer, as the driver gets them. `holders`: the worker of each shard."""
    units = [Forward("dense", layer, s, moments=tuple(moments), emit=False, replay=(None,) * layer) for s in range(2)]
    last = holders[-1]
    done, sums = sum_units(units, holders)
    records = {
        moment: last.execute(Reduce("dense", layer, moment, tuple(part.partials[moment] for part in done)))
        for moment in moments
        if moment not in sums
    }
    records |= {moment: last.execute(Total("dense", layer, moment, summed)) for moment, summed in sums.items()}
    return {moment: records[moment] for moment in moments}


def sum_units(units: Sequence[Summable], holders: Sequence[Worker]) -> tuple[list[Any], dict[Moment, Summed]]:
    """Run each unit on the worker at its index; return the results and the workers' sums of the moments."""
    moments = tuple(moment for moment in units[0].moments if moment.kind in SUMMED)
    if not moments:
        return [worker.execute(unit) for worker, unit in zip(holders, units, strict=True)], {}
    grids = holders[0].execute(ChooseGrids(replace(units[0], moments=moments))).grids
    passed = Sums(f"pass-{uuid.uuid4()}", grids)
    units = [replace(unit, sums=passed) for unit in units]
    done = [worker.execute(unit) for worker, unit in zip(holders, units, strict=True)]
    parts = [collect(worker, units[0], moments) for worker in dict.fromkeys(holders)]
    return done, {
        moment: Summed(
            grids[moment],
            tuple(handle for part in parts for handle in part.partials[moment]),
            sum(part.tokens[moment] for part in parts),
        )
        for moment in moments
    }


def sum_gradients(units: Sequence[Backward], holders: Sequence[Worker]) -> tuple[list[Any], dict[Moment, Any]]:
    """Run the units of a layer; return the results and records of their moments."""
    done, sums = sum_units(units, holders)
    last, layer = holders[-1], units[0].layer
    return done, {moment: last.execute(Total("gradient", layer, moment, summed)) for moment, summed in sums.items()}


def collect(worker: Worker, unit: Summable, moments: tuple[Moment, ...], parts: int = 1) -> Any:
    assert unit.sums is not None
    return worker.execute(Collect(unit.lineage, unit.layer, worker.name, unit.sums.name, moments, parts))


def write_unit(setup: WorkerConfig, layer: int, solved: list[SolveDone]) -> Write:
    forms = {role: form for found in solved for role, form in found.forms.items()}
    roles = tuple(role for task in tasks_of(setup, layer) for role in task.roles)
    return Write(layer, tuple(found.factors for found in solved), roles, forms)
