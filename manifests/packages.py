"""Prepares a process to import Lamina: finds its packages, and refuses others of the same names."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from manifests import VERSION
from manifests.processor import limit_onednn

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or where the project is installed
DISTRIBUTION = "lamina-layer-compression"  # the name in pyproject.toml; it is on no package index
SERVING_DISTRIBUTION = "lamina-compressed-checkpoints"  # the name in deploy/serving/pyproject.toml
PACKAGES = ("manifests", "pipeline", "stores", "workers")
SERVING = ROOT / "deploy" / "serving"  # the folder of the package `lamina` in a checkout
MARK = 'PROJECT = "Lamina"'  # a line in the `__init__.py` of each package
SERVED = {"lamina": "modeling_lamina.py"}  # recognised by a file, because it also has a distribution of its own


def prepare_process() -> None:
    """Prepare this process to import and run the rest of Lamina; call it before any other import of ours.

    In a checkout that is not installed, such as one that `ray job submit --working-dir .` brought to a node, this makes
    `lamina` importable. If one of our packages is missing or belongs to another distribution, it ends the process with
    exit code 2. It raises no InputError, because the code that would catch it may be the other distribution's.
    """
    if (SERVING / "lamina").is_dir() and str(SERVING) not in sys.path:
        sys.path.append(str(SERVING))
    for name in (*PACKAGES, *SERVED):
        fault = package_fault(name) or (name in SERVED and version_fault())
        if fault:
            print(f"wrong input: package {name}: {fault}", file=sys.stderr)
            raise SystemExit(2)
    limit_onednn()


def install_advice(extra: str) -> str:
    """Return the command that installs an extra from the checkout; no package index has this project."""
    return f"`pip install 'CHECKOUT[{extra}]'`, where CHECKOUT is the folder of Lamina's pyproject.toml"


def version_fault() -> str | None:
    """Return why the package `lamina` may be of another version, or None.

    Both distributions contain it. Where both are installed, the files are those of the one that was installed last. The
    `lamina` of a checkout has the checkout's version.
    """
    spec = importlib.util.find_spec("lamina")
    if spec is not None and spec.origin and Path(spec.origin).resolve().is_relative_to(SERVING):
        return None
    try:
        served = version(SERVING_DISTRIBUTION)
    except PackageNotFoundError:
        return None
    if served == VERSION:
        return None
    return (
        f"{SERVING_DISTRIBUTION} {served} is installed beside {DISTRIBUTION} {VERSION}, and both contain it; install "
        "the same version of both, or each in a separate environment"
    )


def package_fault(name: str) -> str | None:
    """Return why a package of ours cannot be used, or None. Imports nothing."""
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if origin is None:
        return "not found; install the project with `pip install .` in its checkout"
    if name in PACKAGES:
        ours = origin.parents[1] == ROOT and MARK in origin.read_text(encoding="utf-8", errors="replace")
    else:
        ours = (origin.parent / SERVED[name]).is_file()
    if ours:
        return None
    return (
        f"Python finds {origin}, which is not Lamina's (Lamina is in {ROOT}): another distribution has the same name; "
        "install Lamina into a separate environment"
    )
