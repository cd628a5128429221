"""deploy/kuberay against KubeRay's definitions, and against what Lamina itself asks for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipeline.run
from manifests.loading import load_manifest
from manifests.schema import Manifest
from pipeline.plan import main as plan
from tests.deploy.kuberay_schema import faults, read_validators
from tests.published import write_hollow_checkpoint

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "deploy" / "kuberay"
JOB, CLUSTER, STORAGE = (
    yaml.safe_load((KUBERAY / f"{name}.yaml").read_text()) for name in ("rayjob", "raycluster", "storage")
)
CLUSTERS = {"rayjob": JOB["spec"]["rayClusterSpec"], "raycluster": CLUSTER["spec"]}
SUBMISSION_MODES = {"K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"}  # no enum in the definition
UNITS = {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20}


@pytest.fixture(scope="module")
def validators(shared_dir: Path) -> dict[tuple[str, str], Any]:
    directory = shared_dir / "kuberay"
    if not directory.is_dir():
        pytest.skip(f"no KubeRay definitions: {directory} is missing")
    return read_validators(directory)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("resource", [JOB, CLUSTER], ids=["rayjob", "raycluster"])
def test_definitions_know_every_field(resource: dict[str, Any], validators: dict[tuple[str, str], Any]) -> None:
    assert faults(resource, validators) == []


def _misspelled(job: dict[str, Any]) -> None:
    job["spec"]["shutdownAfterJobFinish"] = job["spec"].pop("shutdownAfterJobFinishes")


def _group_without_name(job: dict[str, Any]) -> None:
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][1]["groupName"]


def _number_for_text(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 1


def _unknown_version(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["autoscalerOptions"]["version"] = "v3"


def _text_for_number(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"] = "8"


def _deep_in_a_pod(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []


def _port_of_a_container(job: dict[str, Any]) -> None:
    ports = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    ports[0]["containerPort"] = "gcs"


def _other_kind(job: dict[str, Any]) -> None:
    job["kind"] = "RayTask"


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (_misspelled, "spec: Additional properties are not allowed ('shutdownAfterJobFinish' was unexpected)"),
        (_group_without_name, "spec.rayClusterSpec.workerGroupSpecs.1: 'groupName' is a required property"),
        (_number_for_text, "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus: 1 is not of type 'string'"),
        (_unknown_version, "spec.rayClusterSpec.autoscalerOptions.version: 'v3' is not one of ['v1', 'v2']"),
        (_text_for_number, "spec.rayClusterSpec.workerGroupSpecs.0.maxReplicas: '8' is not of type 'integer'"),
        (_deep_in_a_pod, "containers.0: Additional properties are not allowed ('volumeMount' was unexpected)"),
        (_port_of_a_container, "containers.0.ports.0.containerPort: 'gcs' is not of type 'integer'"),
        (_other_kind, "ray.io/v1/RayTask: no such resource"),
    ],
)
def test_planted_errors_are_told(
    plant: Callable[[dict[str, Any]], None], told: str, validators: dict[tuple[str, str], Any]
) -> None:
    wrong = json.loads(json.dumps(JOB))  # no part twice, as aliases of YAML are
    plant(wrong)
    found = faults(wrong, validators)
    assert len(found) == 1
    assert told in found[0]


@pytest.mark.parametrize("spec", CLUSTERS.values(), ids=CLUSTERS)
def test_versions_and_images_are_one(spec: dict[str, Any]) -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "deploy" / "constraints.txt").read_text().split() if "==" in line
    )
    assert spec["rayVersion"] == pinned["ray"]
    assert {container["image"] for container in _containers(spec)} == {"lamina-compress:0.1.0"}
    assert "-t lamina-compress:0.1.0 ." in (ROOT / "deploy" / "docker" / "compress.Dockerfile").read_text()


@pytest.mark.parametrize("spec", CLUSTERS.values(), ids=CLUSTERS)
def test_groups_of_workers(spec: dict[str, Any]) -> None:
    """Spot nodes first; a node that goes has time to hand its work back; volumes exist and are the claim's."""
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert groups["spot"]["priority"] > groups["gpu"]["priority"]
    for group in groups.values():
        assert 0 <= group["minReplicas"] <= group["maxReplicas"]
        pod = group["template"]["spec"]
        drain_s = next(int(entry["value"]) for entry in pod["containers"][0]["env"] if "DRAIN" in entry["name"])
        assert drain_s < pod["terminationGracePeriodSeconds"]
    for pod in _pods(spec):
        claimed = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == claimed.keys()
        assert claimed["data"]["persistentVolumeClaim"]["claimName"] == STORAGE["metadata"]["name"]


def test_both_files_describe_the_same_pods() -> None:
    of_job, of_cluster = (spec["workerGroupSpecs"] for spec in CLUSTERS.values())
    assert [group["template"] for group in of_job] == [group["template"] for group in of_cluster]


def test_the_job_is_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entrypoint is a command that Lamina knows, on a manifest of the image that is right."""
    manifest = _manifest_of(JOB, monkeypatch)
    paths = {manifest.model.source, manifest.output, manifest.run_dir}
    assert len(paths) == 3
    assert all(path.startswith("/data/") for path in paths)
    assert JOB["spec"]["submissionMode"] in SUBMISSION_MODES
    assert JOB["spec"]["shutdownAfterJobFinishes"] is True
    assert "RAY_JOB_STOP_WAIT_TIME_S" in yaml.safe_load(JOB["spec"]["runtimeEnvYAML"])["env_vars"]


@pytest.mark.slow
def test_nodes_hold_the_job_s_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the plan of the job, and by what each pod offers."""
    manifest = _manifest_of(JOB, monkeypatch)
    assert manifest.calibration is not None
    model = write_hollow_checkpoint(tmp_path / "model", "meta-llama/Llama-2-70b-hf")
    command = [str(ROOT / "manifests" / "llama2-70b.yaml"), "--set", f"model.source={model}"]
    assert plan([*command, "--tflops", "100", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    spec = JOB["spec"]["rayClusterSpec"]
    for pod in _pods(spec)[1:]:
        limits = pod["containers"][0]["resources"]["limits"]
        sizes = {volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume}
        objects, spilled = _bytes(sizes["objects"]), _bytes(sizes["session"])
        assert planned["worker_host_bytes"] + objects < 0.9 * _bytes(limits["memory"])  # Ray ends workers at 95 %
        partial_sums = manifest.calibration.shards * planned["statistics_bytes_per_layer"]  # all of them on one node
        assert partial_sums < 0.9 * (objects + spilled)
        assert int(limits["cpu"]) >= manifest.workers.cpus
        assert int(limits["nvidia.com/gpu"]) >= manifest.workers.gpus
    head = spec["headGroupSpec"]
    assert planned["driver_peak_bytes"] < _bytes(_pods(spec)[0]["containers"][0]["resources"]["limits"]["memory"])
    assert JOB["spec"]["entrypointNumCpus"] <= int(head["rayStartParams"]["num-cpus"]) < manifest.workers.cpus
    assert sum(group["maxReplicas"] for group in spec["workerGroupSpecs"]) >= manifest.workers.max
    stored = planned["source_bytes"] + planned["run_dir_bytes"] + planned["output_bytes"]
    assert stored < _bytes(STORAGE["spec"]["resources"]["requests"]["storage"])


def _manifest_of(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """What the entrypoint makes of the options it is given, with the image's folder being this checkout."""
    python, dash_m, module, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", "pipeline.run")
    seen: list[Any] = []
    monkeypatch.setattr(pipeline.run, "run_command", lambda _, options: seen.append(options) or 0)
    assert pipeline.run.main([argument.replace("/opt/lamina", str(ROOT)) for argument in arguments]) == 0
    return load_manifest(seen[0].manifest, seen[0].set)


def _pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's, then the groups'."""
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in _pods(spec) for container in pod["containers"]]


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]
