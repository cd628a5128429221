"""Who may import whom (docs/architecture.md). The whole tree is read with `ast`; nothing is imported to find out.

Every import counts: at the top of a file, inside a function, under TYPE_CHECKING, and `import_module("literal")`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from manifests.method_entry import MethodEntry

ROOT = Path(__file__).resolve().parents[1]
OWN = ("manifests", "pipeline", "stores", "workers", "lamina", "deploy")
FOLDERS = {  # folder of the repository -> what its modules' names start with
    "manifests": "manifests",
    "pipeline": "pipeline",
    "stores": "stores",
    "workers": "workers",
    "deploy/serving/lamina": "lamina",
    "deploy/quickstart": "deploy.quickstart",
}
COMMANDS = {
    f"pipeline.{name}"
    for name in (
        "run",
        "plan",
        "status",
        "verify",
        "evaluate",
        "export",
        "push",
        "report",
        "scale",
        "sweep",
        "init",
        "heal",
    )
}
METHODS = {"flat_llm", "lorc", "lestd", "joint_rank_k"} | {
    name for entry in MethodEntry.__subclasses__() for name in get_args(entry.model_fields["method"].annotation)
}
FILES_WITH_RAY = 4


@dataclass(frozen=True)
class Layer:
    """The modules of ours that the modules under a name may import besides each other; `never`: packages of others;
    `only`: the only ones, besides the standard library."""

    own: tuple[str, ...] = ()
    never: frozenset[str] = frozenset({"ray"})
    only: frozenset[str] | None = None


def _rooms(*names: str) -> tuple[str, ...]:
    return tuple(f"pipeline.{name}" for name in names)


MODELS = _rooms("kernels", "ranks", "families", "methods", "rounding")
WORK = _rooms("units", "driver", "cost_model")
BESIDE_A_JOB = _rooms("inputs", "console", "evaluation", "checkpoint", "healing", "reporting")
LAYERS = {  # the longest name that fits a module is its layer
    "manifests": Layer(never=frozenset({"torch", "ray", "zarr", "transformers"})),
    "lamina": Layer(never=frozenset({"ray", "zarr"})),
    "stores": Layer(("manifests", "lamina.stored_lamina")),
    "pipeline.kernels": Layer(only=frozenset({"torch"})),
    "pipeline.ranks": Layer(("manifests",)),
    "pipeline.families": Layer(
        ("manifests", *(f"lamina.{name}_lamina" for name in ("activation", "block", "foreign", "mixture")))
    ),
    "pipeline.methods": Layer(("manifests", "lamina.processor_lamina", *_rooms("kernels", "ranks", "families"))),
    "pipeline.rounding": Layer(("manifests", *_rooms("kernels", "ranks", "families", "methods"))),
    "pipeline.units": Layer(("manifests", "pipeline.methods")),
    "pipeline.driver": Layer(("manifests", *_rooms("methods", "units"))),
    "pipeline.cost_model": Layer(
        ("manifests", "lamina.processor_lamina", *_rooms("kernels", "families", "methods", "units", "driver"))
    ),
    "pipeline.healing": Layer(("manifests", "stores", "lamina", "pipeline.kernels")),
    "workers": Layer(
        ("manifests", "stores", "lamina", *MODELS, *_rooms("units", "cost_model", "healing")), never=frozenset()
    ),
    "pipeline.inputs": Layer(("manifests", "stores", "workers", "lamina", *MODELS, *WORK)),
    "pipeline.console": Layer(("manifests", "stores", "pipeline.units")),
    "pipeline.evaluation": Layer(
        ("manifests", "stores", "workers", "lamina", *_rooms("families", "units", "driver", "inputs", "console"))
    ),
    "pipeline.checkpoint": Layer(
        ("manifests", "stores", "workers", "lamina", *MODELS, *WORK, *_rooms("inputs", "evaluation"))
    ),
    "pipeline.reporting": Layer(("manifests", "stores", *MODELS, *WORK, *_rooms("console", "evaluation"))),
    "pipeline.verification": Layer(
        ("manifests", "stores", "workers", "lamina", *MODELS, *_rooms("inputs", "checkpoint"))
    ),
    "pipeline.job": Layer(("manifests", "stores", "workers", "lamina", *MODELS, *WORK, *BESIDE_A_JOB)),
    "pipeline.sweeping": Layer(("manifests", "stores", "workers", *MODELS, *WORK, *BESIDE_A_JOB, "pipeline.job")),
    "pipeline.recommendation": Layer(("manifests", "stores", "workers", *MODELS, *WORK, *BESIDE_A_JOB, "pipeline.job")),
    "pipeline": Layer(  # the commands
        (
            "manifests",
            "stores",
            "workers",
            *WORK,
            *BESIDE_A_JOB,
            *_rooms("verification", "job", "sweeping", "recommendation"),
        )
    ),
    "deploy.quickstart": Layer(never=frozenset({"ray", "zarr"})),
}


@dataclass(frozen=True)
class Tree:
    """Sources by module name; `packages` are the names whose file is an `__init__.py`."""

    sources: Mapping[str, str]
    packages: frozenset[str] = field(default=frozenset())

    def imports(self, module: str) -> set[str]:
        """The modules that `module` imports, `from package import submodule` resolved to the submodule."""
        found = set(_imports(ast.parse(self.sources[module]), module if module in self.packages else _parent(module)))
        return {f"{base}.{name}" if f"{base}.{name}" in self.sources else base for base, name in found}


def read_tree(root: Path) -> Tree:
    sources, packages = {}, set()
    for folder, prefix in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [prefix, *path.relative_to(root / folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
                packages.add(".".join(parts))
            sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return Tree(sources, frozenset(packages))


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import; name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, ""


def _room(module: str) -> str:
    """The name in `LAYERS` that a module belongs to."""
    return max((name for name in LAYERS if _under(module, name)), key=len)


def _method(module: str) -> str | None:
    """The method that a module is part of: `pipeline/methods/lorc.py`, or anything in a folder of that name."""
    name = module.removeprefix("pipeline.methods.").split(".")[0]
    return name if module.startswith("pipeline.methods.") and name in METHODS else None


def _allowed_own(module: str, target: str) -> bool:
    """Whether the table lets a module import another. A name in the table stands for the modules of a room, or for one
    module."""
    allowed = LAYERS[_room(module)].own
    return _room(target) in (_room(module), *allowed) or target in allowed


def _fault(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    if target in COMMANDS:
        return "nobody imports a command"
    if target.split(".")[0] in OWN:
        if not _allowed_own(module, target):
            return "not in the table of docs/architecture.md#who-imports-whom"
        if (method := _method(target)) and _room(module) != "pipeline.methods":
            return "only the registry names a method: go through it"
        if method and _method(module) not in (None, method):
            return "a method imports no other method"
        return None
    top, layer = target.split(".")[0], LAYERS[_room(module)]
    if top in layer.never or (layer.only is not None and top not in layer.only | sys.stdlib_module_names):
        return "forbidden here"
    return None


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One import cycle, its first module repeated at the end, or an empty list."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module] & graph.keys()):
            if found := visit(target, (*path, module)):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, ()))), [])


def violations(tree: Tree) -> list[str]:
    graph = {module: tree.imports(module) for module in tree.sources}
    found = [
        f"{module} imports {target}: {fault}"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if (fault := _fault(module, target))
    ]
    of_workers = sorted(module for module in graph if _under(module, "workers"))
    with_ray = [module for module in of_workers if any(_under(target, "ray") for target in graph[module])]
    if len(with_ray) > FILES_WITH_RAY:
        found.append(f"ray is imported by {len(with_ray)} files of workers, {FILES_WITH_RAY} allowed: {with_ray}")
    if cycle := _cycle(graph):
        found.append("import cycle: " + " -> ".join(cycle))
    if cycle := _cycle(_room_graph(graph)):
        found.append("cycle of rooms: " + " -> ".join(cycle))
    return found


def _room_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {_room(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[_room(module)] |= {_room(target) for target in targets & graph.keys()} - {_room(module)}
    return rooms


@pytest.mark.slow
def test_tree_follows_the_table() -> None:
    tree = read_tree(ROOT)
    assert {"manifests", "manifests.schema", "deploy.quickstart.__main__"} <= tree.sources.keys()
    assert violations(tree) == []


def test_a_room_imports_rooms_above_it_alone() -> None:
    names = list(LAYERS)
    for name, layer in LAYERS.items():
        assert all(names.index(_room(own)) < names.index(name) for own in layer.own), name


SOUND = {
    "manifests": "import yaml",
    "manifests.schema": "from manifests import errors",
    "manifests.errors": "",
    "pipeline": "",
    "pipeline.kernels": "",
    "pipeline.kernels.spectra": "import math\nimport torch\nfrom . import moments",
    "pipeline.kernels.moments": "from torch import Tensor",
    "pipeline.ranks.budget": "from manifests.schema import Budget",
    "pipeline.families": "from pipeline.families import llama",
    "pipeline.families.llama": "from manifests import errors",
    "pipeline.methods": "from pipeline.methods.flat_llm import mlp\nfrom pipeline.methods import lorc",
    "pipeline.methods.flat_llm": "",
    "pipeline.methods.flat_llm.mlp": "from .value import solve\nfrom pipeline.kernels import spectra",
    "pipeline.methods.flat_llm.value": "import torch",
    "pipeline.methods.lorc": "from pipeline.ranks import budget",
    "pipeline.cost_model.work": "from pipeline.driver import interfaces\nfrom lamina import processor_lamina",
    "pipeline.plan": "from pipeline.console import arguments\nfrom pipeline.cost_model import work",
    "pipeline.inputs.sources": "import lamina\nfrom stores import source",
    "pipeline.job.stages": "from pipeline.inputs import sources\nfrom workers import pool",
    "pipeline.console.arguments": "import rich",
    "pipeline.driver.driver": "from . import interfaces\nfrom pipeline.units import units",
    "pipeline.driver.interfaces": "",
    "pipeline.units": "",
    "pipeline.units.units": "from pipeline.methods import method",
    "pipeline.methods.method": "",
    "pipeline.run": "from workers import pool\nimport stores\nfrom pipeline.console.arguments import main",
    "stores": "import zarr\nfrom manifests.errors import CorruptError",
    "workers": "",
    "workers.cluster": "import ray",
    "workers.pool": "import ray\nfrom workers import actor, block",
    "workers.training": "from ray.train.torch import TorchTrainer",
    "workers.actor": "from ray import remote\nfrom pipeline.kernels import moments",
    "workers.tapped_layer": "import lamina\nimport stores",
    "lamina": "from .modeling import LaminaModel",
    "lamina.modeling": "import torch, transformers",
    "lamina.processor_lamina": "import torch",
}
PACKAGES = frozenset(
    {"manifests", "pipeline", "pipeline.kernels", "pipeline.families", "pipeline.methods", "pipeline.methods.flat_llm"}
    | {"pipeline.driver", "pipeline.units", "stores", "workers", "lamina"}
)


def test_sound_tree_has_no_violation() -> None:
    assert violations(Tree(SOUND, PACKAGES)) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("manifests.schema", "import torch", "manifests.schema imports torch: forbidden here"),
        (
            "manifests.schema",
            "from pipeline.driver import interfaces",
            "driver.interfaces: not in the table",
        ),
        ("pipeline.kernels.lowrank", "import numpy", "imports numpy: forbidden here"),
        ("pipeline.kernels.lowrank", "from manifests.errors import InputError", "manifests.errors: not in the table"),
        ("pipeline.kernels.lowrank", "from ..ranks import budget", "imports pipeline.ranks.budget: not in the table"),
        ("pipeline.ranks.more", "import stores", "imports stores: not in the table"),
        ("pipeline.ranks.more", "from pipeline.kernels import spectra", "kernels.spectra: not in the table"),
        ("pipeline.families.opt", "def f():\n    import workers.pool", "imports workers.pool: not in the table"),
        ("pipeline.methods.lorc", "import ray", "pipeline.methods.lorc imports ray: forbidden here"),
        ("pipeline.methods.lorc", "from stores import Shards", "imports stores: not in the table"),
        ("pipeline.methods.lorc", "from pipeline.methods.flat_llm.value import f", "imports no other method"),
        ("pipeline.methods.lestd", "from . import lorc", "a method imports no other method"),
        ("pipeline.methods.lorc", "import pipeline.driver.driver", "imports pipeline.driver.driver: not in the table"),
        ("pipeline.cost_model.work", "import importlib\nimportlib.import_module('stores')", "stores: not in the table"),
        ("pipeline.cost_model.work", "import lamina.modeling", "lamina.modeling: not in the table"),
        ("pipeline.driver.driver", "from pipeline.methods import lorc", "only the registry names a method"),
        ("pipeline.driver.driver", "from pipeline.cost_model import work", "cost_model.work: not in the table"),
        ("workers.tapped_layer", "from pipeline.methods.flat_llm import mlp", "only the registry names a method"),
        ("pipeline.inputs.sources", "from pipeline.job import stages", "pipeline.job.stages: not in the table"),
        ("pipeline.job.more", "import ray", "pipeline.job.more imports ray: forbidden here"),
        (
            "pipeline.driver.driver",
            "if TYPE_CHECKING:\n    from ray.actor import ActorHandle",
            "ray.actor: forbidden here",
        ),
        (
            "pipeline.driver.driver",
            "from pipeline.kernels import moments",
            "pipeline.kernels.moments: not in the table",
        ),
        ("pipeline.driver.driver", "import pipeline.run", "imports pipeline.run: nobody imports a command"),
        (
            "pipeline.driver.interfaces",
            "from pipeline.console import arguments",
            "imports pipeline.console.arguments: not in the table",
        ),
        ("pipeline.verify", "from pipeline.run import main", "imports pipeline.run: nobody imports a command"),
        (
            "stores.zarrs",
            "from pipeline.driver.interfaces import Store",
            "imports pipeline.driver.interfaces: not in the table",
        ),
        ("stores.zarrs", "__import__('ray')", "stores.zarrs imports ray: forbidden here"),
        ("workers.more", "from ray.util import metrics", "ray is imported by 5 files of workers, 4 allowed"),
        ("workers.tapped_layer", "from pipeline.run import main", "imports pipeline.run: nobody imports a command"),
        ("lamina.config", "import zarr", "lamina.config imports zarr: forbidden here"),
        ("lamina.config", "from manifests import errors", "imports manifests.errors: not in the table"),
        (
            "deploy.quickstart.model",
            "import pipeline.driver.interfaces",
            "imports pipeline.driver.interfaces: not in the table",
        ),
        (
            "pipeline.driver.interfaces",
            "from pipeline.driver.driver import step",
            "import cycle: pipeline.driver.interfaces -> pipeline.driver.driver",
        ),
        ("pipeline.methods.lorc", "from pipeline.methods import METHODS", "import cycle: pipeline.methods -> "),
    ],
)
def test_planted_violation_is_found(module: str, source: str, expected: str) -> None:
    found = violations(Tree({**SOUND, module: source}, PACKAGES))
    assert any(expected in line for line in found), found
