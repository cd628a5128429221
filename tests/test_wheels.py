"""The wheels of `make dist`: the same bytes twice, and enough to work without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.packages import SERVING_DISTRIBUTION
from tests.factories import make_model, write_text
from tools.distributions import ROOT, brought_packages, build_wheels, wheel_metadata

pytestmark = pytest.mark.nightly
LOAD = (
    "import lamina, sys; from transformers import AutoModelForCausalLM as Auto;"
    "model = Auto.from_pretrained(sys.argv[1]); print(type(model).__name__, lamina.__file__);"
    "import importlib.util; print('pipeline' if importlib.util.find_spec('pipeline') else 'nothing else')"
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel with everything and the one for serving."""
    folder = tmp_path_factory.mktemp("dist")
    build_wheels(folder)
    return sorted(folder.glob("*.whl"), key=lambda path: "layer_compression" not in path.name)


class Environment:
    """A virtual environment with some wheels, and the packages of others that this environment has."""

    def __init__(self, folder: Path, *wheels: Path) -> None:
        self.python, self.folder = folder / "env" / "bin" / "python", folder
        (folder / "lamina").mkdir()  # as a clone is called: Python prefers the package to a folder without modules
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (own,) = (folder / "env" / "lib").glob("python3*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps", *wheels]
        subprocess.run(pip, check=True, env=_without_checkout())
        others = [path for path in sys.path if Path(path).name == "site-packages"]  # whose .pth files are not read
        (own / "others.pth").write_text("".join(f"{path}\n" for path in others))

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Python's answer to these arguments, in a folder without a checkout."""
        options = {"cwd": self.folder, "env": _without_checkout(), "timeout": 280}
        return subprocess.run([self.python, *arguments], capture_output=True, text=True, **options)

    def succeed(self, *arguments: str | Path) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _without_checkout() -> dict[str, str]:
    """Return the environment without PYTHONPATH: pip would take a distribution that it finds there for installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_same_commit_gives_the_same_bytes(wheels: list[Path], tmp_path: Path) -> None:
    build_wheels(tmp_path)
    assert [(tmp_path / wheel.name).read_bytes() == wheel.read_bytes() for wheel in wheels] == [True, True]


def test_a_bill_names_what_a_wheel_brings(wheels: list[Path]) -> None:
    names = [{pin.partition("==")[0] for pin in brought_packages(wheel_metadata(wheel))} for wheel in wheels]
    assert {"ray", "torch", "transformers", "zarr", "numpy", "safetensors"} <= names[0]
    assert {"torch", "transformers", "safetensors"} <= names[1]
    assert "ray" not in names[1]
    pinned = (ROOT / "deploy" / "constraints.txt").read_text().split()
    assert {pin for wheel in wheels for pin in brought_packages(wheel_metadata(wheel))} - {*pinned} <= {"pip==23.2.1"}


def test_each_wheel_alone(wheels: list[Path], tmp_path: Path) -> None:
    model, text = make_model(tmp_path / "model", peaked=False), write_text(tmp_path / "text.txt", 20_000)
    (tmp_path / "compress").mkdir()
    (tmp_path / "serve").mkdir()
    compressing = Environment(tmp_path / "compress", wheels[0])
    listed = compressing.succeed("-m", "pipeline.init", "--list").splitlines()
    shipped = next(line.partition("  ")[0] for line in listed if "llama3-8b" in line)
    assert Path(shipped).is_relative_to(tmp_path / "compress" / "env")
    options = ("--config", model / "config.json", "--tflops", "1", "--json")
    assert json.loads(compressing.succeed("-m", "pipeline.plan", shipped, *options))["layers"] == 3
    assert "fits" in compressing.succeed("-m", "pipeline.init", model, "--text", text)
    assert "fits" in compressing.succeed("-m", "pipeline.plan", "job.yaml")
    compressing.succeed("-m", "pipeline.run", "job.yaml", "--in-process", "--set", "workers.max=1")
    assert "(done)" in compressing.succeed("-m", "pipeline.report", "model-keep-0.8.run")
    output = tmp_path / "compress" / "model-keep-0.8"
    serving = Environment(tmp_path / "serve", wheels[1])
    for environment, expected in ((compressing, "pipeline"), (serving, "nothing else")):
        first, second = environment.succeed("-c", LOAD, output).splitlines()
        (own,) = environment.folder.glob("env/lib/*/site-packages")
        assert first == f"LaminaForCausalLM {own}/lamina/__init__.py"
        assert second == expected


def test_both_in_one_environment(wheels: list[Path], tmp_path: Path) -> None:
    """The same version of both works; different versions are refused, as the files are those of one of them."""
    both = Environment(tmp_path, *wheels)
    both.succeed("-m", "pipeline.init", "--list")
    (metadata,) = tmp_path.glob("env/lib/*/site-packages/lamina_compressed_checkpoints*/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.1.0", "Version: 0.0.9"))
    refused = both.run("-m", "pipeline.init", "--list")
    assert refused.returncode == 2
    assert f": {SERVING_DISTRIBUTION} 0.0.9 is installed beside" in refused.stderr
