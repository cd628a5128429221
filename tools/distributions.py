"""`make dist`: builds the wheels of the last commit reproducibly, with a bill of materials for each.

The same commit and the same setuptools give the same bytes anywhere: the wheels are built from files of git alone, with
the commit's time in place of the files' times. A bill names the packages that a wheel brings, at the versions that this
environment has (`deploy/constraints.txt`), in CycloneDX's format.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (Path("."), Path("deploy/serving"))
BILLS = ROOT / ".engines" / "cyclonedx"  # a separate environment: it needs other versions than the project


def main() -> None:
    """Build both wheels, their bills of materials, and a list of digests."""
    parser = argparse.ArgumentParser(prog="python -m tools.distributions", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    parser.add_argument("--no-bills", action="store_true", help="wheels alone, without a package index")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.iterdir():
        old.unlink()
    build_wheels(arguments.output)
    if not arguments.no_bills:
        for wheel in sorted(arguments.output.glob("*.whl")):
            write_bill(wheel)
    files = sorted(path for path in arguments.output.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (arguments.output / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.writelines(sums)


def build_wheels(output: Path) -> None:
    """Build the wheels of the last commit into a folder."""
    time = _git("log", "-1", "--format=%ct").decode().strip()
    os.umask(0o022)  # a wheel holds the modes of its files
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        for project in PROJECTS:
            subprocess.run(
                [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
                 str(output), str(Path(folder, project))],
                env={**os.environ, "SOURCE_DATE_EPOCH": time}, check=True,
            )  # fmt: skip


def write_bill(wheel: Path) -> None:
    """Write WHEEL.cdx.json beside a wheel."""
    tool = BILLS / "bin" / "cyclonedx-py"
    if not tool.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BILLS)], check=True)
        subprocess.run(
            [str(BILLS / "bin" / "python"), "-m", "pip", "install", "--quiet", "cyclonedx-bom==7.5.0"], check=True
        )
    described = wheel_metadata(wheel)
    (pyproject,) = [
        path for project in PROJECTS if f'"{described.name}"' in (path := ROOT / project / "pyproject.toml").read_text()
    ]
    pins = "".join(f"{requirement}\n" for requirement in sorted(brought_packages(described)))
    command = [tool, "requirements", "-", "--pyproject", pyproject, "--mc-type", "library"]
    command += ["--output-reproducible", "--output-file", wheel.with_suffix(".cdx.json")]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # of the tool's, about bills without a tree of dependencies
    subprocess.run([str(word) for word in command], input=pins, text=True, env=quiet, check=True)


def wheel_metadata(wheel: Path) -> metadata.Distribution:
    """Return the metadata inside of a wheel."""
    (folder,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    return metadata.PathDistribution(folder)


def brought_packages(distribution: metadata.Distribution) -> set[str]:
    """Return NAME==VERSION of everything that a distribution requires here, directly or not."""
    pins: dict[str, str] = {}
    pending = list(_requirements(distribution, frozenset()))
    while pending:
        requirement = pending.pop()
        name = normalized(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in pins:
            continue
        required = metadata.distribution(requirement.name)
        pins[key] = f"{name}=={required.version.partition('+')[0]}"  # a local version, such as torch's, has no index
        pending += _requirements(required, frozenset(requirement.extras))
    return {*pins.values()}


def normalized(name: str) -> str:
    """Return a distribution's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(distribution: metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield the requirements of a distribution, with these extras, that apply in this environment."""
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
