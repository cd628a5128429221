"""Whether what Python imports under our names is ours: other distributions may have packages of the same names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or where the project is installed
DISTRIBUTION = "lamina-layer-compression"  # as pyproject.toml names it; it is on no package index
SERVING_DISTRIBUTION = "lamina-compressed-checkpoints"  # likewise deploy/serving/pyproject.toml
PACKAGES = ("manifests", "pipeline", "stores", "workers")
SERVING = ROOT / "deploy" / "serving"  # where a checkout has the package `lamina`
MARK = 'PROJECT = "Lamina"'  # in the `__init__.py` of each
SERVED = {"lamina": "modeling_lamina.py"}  # known by a file, as it may be installed by itself


def find_serving_package() -> None:
    """In a checkout that is not installed, makes `lamina` importable: on a node that a job was submitted to, say."""
    if (SERVING / "lamina").is_dir() and str(SERVING) not in sys.path:
        sys.path.append(str(SERVING))


def install_advice(extra: str) -> str:
    """How to install what an extra of this project names: by the path of the checkout, as no index has the project."""
    return f"`pip install 'CHECKOUT[{extra}]'`, where CHECKOUT is the folder of Lamina's pyproject.toml"


def check_packages() -> None:
    """Ends the command, exit code 2, when one of our packages is missing or is another's. Imports none of them.

    It is no exception: nothing that could catch one has been imported, and must not be from elsewhere.
    """
    for name in (*PACKAGES, *SERVED):
        if fault := package_fault(name):
            print(f"wrong input: package {name}: {fault}", file=sys.stderr)
            raise SystemExit(2)


def package_fault(name: str) -> str | None:
    """What is wrong with a package of ours, if anything."""
    found = importlib.util.find_spec(name)
    origin = Path(found.origin).resolve() if found is not None and found.origin else None
    if origin is None:
        return "not found; install the project with `pip install .` in its checkout"
    if name in PACKAGES:
        ours = origin.parents[1] == ROOT and MARK in origin.read_text(encoding="utf-8", errors="replace")
    else:
        ours = (origin.parent / SERVED[name]).is_file()
    if ours:
        return None
    return (
        f"Python finds {origin}, which is not Lamina's (that lies in {ROOT}): another distribution has taken the name; "
        "install Lamina into an environment of its own"
    )
