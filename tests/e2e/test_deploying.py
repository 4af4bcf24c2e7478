"""What is in `deploy/` is what its tools accept, and says the same in each place."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from check_jsonschema import builtin_schemas
from jsonschema.validators import validator_for
from patience import PATIENCE_S

import weft

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/weft"
SCHEMAS = Path(builtin_schemas.__file__).parent / "vendor"
KUBERNETES = "1.33"
CHOICES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all options": {
        "args": ["--max-num-seqs=64"],
        "apiKeySecret": "keys",
        "hubTokenSecret": "hub",
        "fleetKeySecret": "fleet",
        "registry": {"uri": "/registry", "claim": "adapters"},
        "imagePullSecrets": [{"name": "pull"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "a"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "models", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
        "accelerator": {"count": 4},
        "podMonitor": {"enabled": True, "apiKeySecret": "scrapes"},
        "autoscaling": {"kind": "keda"},
    },
    "on a CPU": {
        "accelerator": {"count": 0},
        "fleetKeySecret": "fleet",
        "registry": {"claim": "adapters"},
        "preStopSeconds": 0,
        "podMonitor": {"enabled": True},
        "autoscaling": {"kind": "hpa"},
    },
}
MADE: dict[str, dict[str, Any]] = runpy.run_path(str(DEPLOY / "choices.py"))["CHOICES"]
"""For what `deploy/kubernetes/` was made."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def errors_of(path: Path, schema: str) -> list[str]:
    """Where a file is not as the schema says."""
    given = json.loads((SCHEMAS / f"{schema}.json").read_text())
    document = yaml.safe_load(path.read_text())
    if True in document:  # `on` is a word to GitHub, and a truth to YAML 1.1
        document["on"] = document.pop(True)
    return [error.json_path for error in validator_for(given)(given).iter_errors(document)]


@pytest.fixture(scope="module")
def charts() -> dict[str, Any]:
    """What Helm says of the chart, and makes of CHOICES."""
    done = run(
        sys.executable,
        ROOT / "tests/support/charts.py",
        CHART,
        *(json.dumps(values) for values in CHOICES.values()),
        *(json.dumps(values) for values in MADE.values()),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def documents(files: dict[str, str]) -> list[dict[str, Any]]:
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [doc for text in texts for doc in yaml.safe_load_all(text) if doc]


def test_helm_finds_nothing_wrong_with_the_chart(charts: dict[str, Any]) -> None:
    said = charts["lint"]
    assert not said["errors"]
    assert all(message["error"] == "icon is recommended" for message in said["messages"])


@pytest.mark.parametrize("number", range(len(CHOICES)), ids=list(CHOICES))
def test_the_charts_manifests_are_kubernetes_own(charts: dict[str, Any], number: int) -> None:
    docs = documents(charts["rendered"][number])
    for doc in docs:
        if doc["apiVersion"].partition("/")[0] not in ("keda.sh", "monitoring.coreos.com"):
            kubernetes_validate.validate(doc, KUBERNETES, strict=True)
    kinds = [doc["kind"] for doc in docs]
    assert len({(doc["kind"], doc["metadata"]["name"]) for doc in docs}) == len(docs)
    scaled = ("ScaledObject" in kinds) + ("HorizontalPodAutoscaler" in kinds)
    deployment = next(doc for doc in docs if doc["kind"] == "Deployment")["spec"]
    # Two who say how many pods there are would undo each other's work.
    assert ("replicas" in deployment) == (not scaled)
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    args = container["args"]
    shutdown_s = int(next(a for a in args if a.startswith("--shutdown-timeout=")).split("=")[1])
    lifecycle = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
    pause_s = lifecycle["preStop"]["sleep"]["seconds"]
    assert ("lifecycle" in container) == (pause_s > 0), "1.32 refuses a pause of 0"
    # The server needs 5 s more at most, and then its process ends by itself.
    assert pod["terminationGracePeriodSeconds"] > pause_s + shutdown_s + 5
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    labels = deployment["template"]["metadata"]["labels"].items()
    for doc in docs:
        if doc["kind"] == "Service":
            assert doc["spec"]["selector"].items() <= labels
            ports = {port["name"] for port in container["ports"]}
            assert {port["targetPort"] for port in doc["spec"]["ports"]} <= ports
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert "registry" not in mounted or "--registry=/registry" in args
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"autoscaling": {"kind": "KEDA"}}, "autoscaling.kind must be none, keda or hpa"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.kind needs fleetKeySecret"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], why: str) -> None:
    done = run(sys.executable, ROOT / "tests/support/charts.py", CHART, json.dumps(values))
    assert done.returncode != 0 and why in done.stderr


def test_autoscalers_ask_for_what_the_monitor_collects(charts: dict[str, Any]) -> None:
    by_kind = [{d["kind"]: d["spec"] for d in documents(files)} for files in charts["rendered"]]
    _, keda, hpa = by_kind[: len(CHOICES)]
    for found in (keda, hpa):
        [endpoint] = found["PodMonitor"]["podMetricsEndpoints"]
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "weft"}]
    [trigger] = keda["ScaledObject"]["triggers"]
    assert 'job="weft"' in trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false", "no metric is not the number 0"
    [metric] = hpa["HorizontalPodAutoscaler"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {"job": "weft"}


def test_the_notes_send_a_key_where_one_is_asked_for(charts: dict[str, Any]) -> None:
    found = [files["weft/templates/NOTES.txt"] for files in charts["rendered"][: len(CHOICES)]]
    keyed = [bool(re.search(r"curl -H 'Authorization: Bearer \w+' http", text)) for text in found]
    assert keyed == ["apiKeySecret" in values for values in CHOICES.values()]
    assert all(re.search(r"curl .*http://127.0.0.1:8000/v1/models", text) for text in found)


def test_a_pod_uses_all_devices_that_it_gets(charts: dict[str, Any]) -> None:
    found = []
    for files in charts["rendered"][: len(CHOICES)]:
        [deployment] = [d for d in documents(files) if d["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        ranks = [a for a in container["args"] if a.startswith("--tensor-parallel-size")]
        found.append((container["resources"]["limits"].get("nvidia.com/gpu"), ranks))
    assert found == [(1, []), (4, ["--tensor-parallel-size=4"]), (None, [])]


def test_prometheus_has_a_key_of_its_own(charts: dict[str, Any]) -> None:
    """With `--tenants`, metrics need an admin's key, and the server takes none from a Secret."""
    [monitor] = [d for d in documents(charts["rendered"][1]) if d["kind"] == "PodMonitor"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "scrapes", "key": "api-key"}


def test_the_manifests_in_the_repository_are_the_charts(charts: dict[str, Any]) -> None:
    """`python deploy/render.py` writes them."""
    for name, files in zip(MADE, charts["rendered"][len(CHOICES) :], strict=True):
        kept = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
        by_path = dict(sorted(files.items()))
        assert kept == documents(by_path)


def test_a_pod_is_the_image_that_the_dockerfile_makes(charts: dict[str, Any]) -> None:
    """User, folders and port are said in several places."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    user = int(re.search(r"^USER (\d+):", dockerfile, re.MULTILINE)[1])
    docs = documents(charts["rendered"][0])
    pods = [doc["spec"]["template"]["spec"] for doc in docs if doc["kind"] == "Deployment"]
    cluster = yaml.safe_load((DEPLOY / "kuberay/raycluster.yaml").read_text())["spec"]
    pods += [cluster["headGroupSpec"]["template"]["spec"]]
    pods += [group["template"]["spec"] for group in cluster["workerGroupSpecs"]]
    for pod in pods:
        assert pod["securityContext"]["runAsUser"] == user
        [container] = pod["containers"]
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/cache", "/tmp"} <= paths
        pod_template = {"metadata": {"name": "a"}, "spec": pod, "apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(pod_template, KUBERNETES, strict=True)
    assert "\nEXPOSE 8000\n" in dockerfile
    assert 'VOLUME ["/cache"]' in dockerfile


def test_rays_agent_answers_the_probes_of_ray_pods() -> None:
    """KubeRay ends pods that do not answer. Its own probes need a program that the image lacks."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["ray"][0].startswith("ray[default]"), "it has the agent"
    cluster = yaml.safe_load((DEPLOY / "kuberay/raycluster.yaml").read_text())["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_the_workflows() -> None:
    done = run("actionlint", *(ROOT / ".github/workflows").iterdir())
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_and_what_runs_it() -> None:
    done = run(Path(sys.executable).with_name("hadolint"), DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout
    for name in ("compose.yaml", "compose.cuda.yaml"):
        assert not errors_of(DEPLOY / name, "compose-spec")
    for path in (ROOT / ".github/workflows").iterdir():
        assert not errors_of(path, "github-workflows")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_knows_all_that_the_unit_says(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/weft.service").read_text()
    assert re.search(r"^RestrictAddressFamilies=.*AF_NETLINK", text, re.MULTILINE), "ranks need it"
    unit = tmp_path / "weft.service"
    unit.write_text(text.replace("/opt/weft/bin/weft", "/bin/true"))
    done = run("systemd-analyze", "verify", unit)
    assert not re.findall(r"^.*weft\.service.*$", done.stderr, re.MULTILINE)


def test_there_is_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == weft.__version__ == version("weft")
