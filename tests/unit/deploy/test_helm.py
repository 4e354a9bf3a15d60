"""The chart renders what deploy/kuberay holds, for every combination of components, and rejects values that would not
run. Helm itself renders it: helm-python-sdk has Helm's own code."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from pdserve.launch.spec import router_config as router_config_of
from pdserve.telemetry import metric_names
from scripts.kustomize import CHART, COMPONENTS, by_name, merged, operations, parsed, rendered, values_of
from tests.unit.deploy.manifests import KUBERAY, Manifest, apply, container, load, pod_templates
from tests.unit.deploy.test_manifests import KEY_FILE, KUBERNETES, asked, called, named, router_config

ENGINES = [(), ("gpu",), ("gpu", "gpu-parallel"), ("vllm",)]
EXTRAS = [(), ("tls",), ("tenants",), ("tls", "tenants")]
COMBINATIONS = [(*engine, *extra) for engine in ENGINES for extra in EXTRAS]

#: Values that no component has.
AUTOSCALED = {"autoscaling": {"enabled": True, "minWorkers": 2, "maxWorkers": 6, "roles": "auto", "idleTimeoutS": 120}}
LARGE = {
    "image": {"repository": "registry.example.com/pdserve", "tag": "0.1.1", "pullSecrets": ["registry"]},
    "secret": "other",
    "drainS": 120,
    "preStopS": 20,
    "workers": {
        "prefill": 3,
        "decode": 5,
        "pods": 8,
        "minAvailable": 6,
        "nodeSelector": {"pool": "workers"},
        "tolerations": [{"key": "pool", "operator": "Equal", "value": "workers", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "launcher": {"extraArgs": ["--set=worker.kv_dtype=int8"]},
    "router": {"minReplicas": 3, "maxReplicas": 3},
    "gateway": {"ingress": {"enabled": False}},
    "observability": {"otlp": "tempo.monitoring:4317", "collector": {"enabled": False}},
    "networkPolicy": {
        "dns": {"namespace": "openshift-dns", "port": 5353},
        "egress": [{"to": [{"namespaceSelector": {}}]}],
    },
}


@functools.cache
def chart(text: str) -> list[Manifest]:
    return parsed(rendered(json.loads(text)))


def render(values: dict[str, Any]) -> list[Manifest]:
    return chart(json.dumps(values))


def test_every_values_file_is_a_component() -> None:
    assert {path.stem for path in (CHART / "values").iterdir()} == set(COMPONENTS)
    assert {path.name for path in KUBERAY.iterdir() if path.is_dir()} == set(COMPONENTS)
    listed = re.findall(r"^#  - (\S+)$", (KUBERAY / "kustomization.yaml").read_text(), re.MULTILINE)
    assert listed == list(COMPONENTS)


@pytest.mark.parametrize("components", COMBINATIONS, ids=called)
def test_components_combine_as_values_files_do(components: tuple[str, ...]) -> None:
    assert by_name(load(*components)) == by_name(render(values_of(components)))


def test_a_patch_leads_from_one_document_to_the_other() -> None:
    before = {"a/b": 1, "same": [1], "list": [{"x": 1}, 2], "gone": {}, "whole": {"k": 1}}
    after = {"a/b": 2, "same": [1], "list": [{"x": 3}, 2, 4], "whole": [], "new": {"n": 1}}
    changed = json.loads(json.dumps(before))
    for operation in operations(before, after):
        apply(changed, operation)
    assert changed == after


def test_a_shorter_list_replaces_the_list() -> None:
    assert list(operations({"a": [1, 2]}, {"a": [1]})) == [{"op": "replace", "path": "/a", "value": [1]}]


@pytest.mark.parametrize("values", [AUTOSCALED, LARGE], ids=["autoscaled", "large"])
def test_other_values_match_the_published_schemas(values: dict[str, Any]) -> None:
    schema = json.loads((Path(__file__).parent / "schemas/raycluster.json").read_text())
    for one in render(values):
        if one["kind"] == "RayCluster":
            jsonschema.Draft202012Validator(schema).validate(one)
            for name, template in pod_templates([one]):
                wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
                kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)
        elif one not in render({}):  # the others are validated with the manifests
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_values_reach_the_pods() -> None:
    manifests = render(LARGE)
    launcher, router = container(manifests, "pdserve-launcher"), container(manifests, "pdserve-router")
    assert {"--prefill=3", "--decode=5", "--otlp=tempo.monitoring:4317"} <= set(launcher["args"])
    assert launcher["args"][-1] == "--set=worker.kv_dtype=int8"
    assert router["image"] == "registry.example.com/pdserve:0.1.1"
    assert "--drain-s=120" in router["args"]
    assert router["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    ports = {one["name"]: one["containerPort"] for one in container(manifests, "ray-workers")["ports"]}
    assert ports == {f"metrics-p{i}": 9501 + i for i in range(3)} | {f"metrics-d{i}": 9504 + i for i in range(5)}
    assert not {"Ingress", "HorizontalPodAutoscaler"} & {one["kind"] for one in manifests}
    assert "pdserve-otel-collector" not in json.dumps(manifests)
    assert named(manifests, "Deployment")["pdserve-router"]["spec"]["replicas"] == 3
    assert named(manifests, "PodDisruptionBudget")["pdserve-worker"]["spec"]["minAvailable"] == 6
    assert '"key": "token"' in json.dumps(manifests)
    assert {one["secretName"] for one in find(manifests, "secret")} == {"other"}
    assert {one["name"] for one in find(manifests, "secretKeyRef")} == {"other"}


def find(document: Any, key: str) -> list[Any]:
    if isinstance(document, dict):
        own = [document[key]] if key in document else []
        return own + [one for value in document.values() for one in find(value, key)]
    return [one for value in document for one in find(value, key)] if isinstance(document, list) else []


def test_autoscaling_gives_the_head_and_nothing_else_access_to_the_api_server() -> None:
    manifests = render(AUTOSCALED)
    [cluster] = named(manifests, "RayCluster").values()
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert "replicas" not in group, "an upgrade of the release would set it back"
    can = {name: one["spec"]["automountServiceAccountToken"] for name, one in pod_templates(manifests)}
    assert {name for name, has in can.items() if has} == {"ray-head"}
    egress = named(manifests, "NetworkPolicy")["pdserve-autoscaler"]["spec"]
    assert egress["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "ray-head"
    names = {one["name"] for one in cluster["spec"]["autoscalerOptions"]["env"]}
    assert names == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}, "Ray asks its autoscaler for the token too"


@pytest.mark.parametrize(
    ("workers", "pods"),
    [
        ({}, (2, 7)),
        ({"resources": {"cpu": "8"}}, (1, 2)),
        ({"resources": {"cpu": "4500m"}}, (1, 4)),
        ({"resources": {"cpu": 4}, "tensorParallel": 2}, (2, 7)),
        ({"device": "cuda", "resources": {"cpu": 32, "gpus": 8}, "tensorParallel": 2}, (1, 2)),
        ({"device": "cuda", "resources": {"cpu": 4, "gpus": 8}, "tensorParallel": 2}, (1, 4)),
    ],
)
def test_pods_hold_as_many_workers_as_the_launcher_may_start(workers: dict[str, Any], pods: tuple[int, int]) -> None:
    """And one more, which a roll-out adds."""
    values = merged(AUTOSCALED, {"workers": workers, "model": {"path": "/models/served"}})
    manifests = render(values)
    spec = asked(manifests).spec
    assert (spec.autoscale, spec.roles, spec.ray_wait_s) == ("2:6", "auto", 300.0)
    [cluster] = named(manifests, "RayCluster").values()
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == pods
    ports = {one["containerPort"] for one in container(manifests, "ray-workers")["ports"]}
    assert ports == set(range(9501, 9501 + 7))


def test_keda_starts_the_workers_that_the_routers_want_beside_the_launchers() -> None:
    scaled = {"minWorkers": 3, "maxWorkers": 6, "decode": {"name": "more-decode"}}
    manifests = render({"keda": {"enabled": True, **scaled}, "workers": {"decode": 2}})
    [(name, found)] = named(manifests, "ScaledObject").items()
    assert name == "pdserve-decode", "prefill names no workload"
    assert found["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "more-decode"}
    [trigger] = found["spec"]["triggers"]
    of_decode = 'pdserve_desired_workers{namespace="default",role="decode"}'
    assert trigger["metadata"]["query"] == f"clamp_min(max({of_decode}) - 2, 0)"
    assert metric_names.DESIRED_WORKERS.name in trigger["metadata"]["query"]
    config = router_config(manifests)
    assert (config.scaling, config.scaling_routers) == ("3:6", "pdserve:50051")
    assert not named(render({}), "ScaledObject")
    assert router_config(render({})).scaling == ""


def test_a_change_of_settings_restarts_the_launcher() -> None:
    def mark(values: dict[str, Any]) -> str:
        [template] = [one for name, one in pod_templates(render(values)) if name == "pdserve-launcher"]
        return str(template["metadata"]["annotations"]["checksum/settings"])

    assert mark({}) != mark({"drainS": 60})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"worker": {"prefill": 2}}, "worker"),
        ({"workers": {"decode": 0}}, "decode"),
        ({"workers": {"prefill": "2"}}, "prefill"),
        ({"workers": {"resources": {"memory": "64 GB"}}}, "memory"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"router": {"extraArgs": ["port=1"]}}, "extraArgs"),
        ({"observability": {"otlp": "http://tempo:4317"}}, "otlp"),
        ({"drainS": -1}, "drainS"),
        ({"keda": {"prometheus": 'http://p" or'}}, "prometheus"),
    ],
)
def test_the_schema_rejects(values: dict[str, Any], message: str) -> None:
    with helm_python.Chart.load(CHART) as loaded, pytest.raises(helm_python.HelmValuesError, match=message):
        loaded.validate_schema(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": {"device": "cuda"}}, "expected at least workers.tensorParallel"),
        ({"workers": {"resources": {"gpus": 1}}}, "needs workers.device: cuda"),
        ({"workers": {"device": "cuda", "resources": {"gpus": 1}}}, "need a checkpoint of yours"),
        (merged(values_of(["gpu"]), {"workers": {"decode": 5}}), "6 workers of 1 GPUs do not fit on 2 pods of 1 GPUs"),
        ({"router": {"minReplicas": 9}}, "greater than router.maxReplicas"),
        ({"autoscaling": {"enabled": True, "minWorkers": 9}}, "2 workers at the start, expected 9 to 8"),
        ({"autoscaling": {"enabled": True, "maxWorkers": 1}}, "2 workers at the start, expected 2 to 1"),
        (merged(AUTOSCALED, {"workers": {"threads": 3}}), "hold no worker"),
        (merged(AUTOSCALED, {"keda": {"enabled": True, "decode": {"name": "d"}}}), "expected false beside autoscaling"),
        ({"keda": {"minWorkers": 9}}, "greater than keda.maxWorkers"),
        ({"keda": {"enabled": True}}, "expected the workload of your decode workers"),
        ({"workers": {"minAvailable": 2}}, "must be less than workers.pods"),
    ],
)
def test_the_chart_rejects_values_that_would_not_run(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        rendered(values)


def test_more_workers_fit_on_gpu_pods_of_the_autoscaler() -> None:
    assert rendered(merged(merged(values_of(["gpu"]), {"workers": {"decode": 5}}), AUTOSCALED))


def test_helm_lint_finds_nothing_but_the_missing_icon() -> None:
    report = helm_python.lint(CHART, {}, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_every_value_is_in_the_schema() -> None:
    def check(schema: Any, values: Any, path: str) -> None:
        for name, value in values.items():
            assert name in schema, f"{path}{name}"
            if "properties" in schema[name]:
                check(schema[name]["properties"], value, f"{path}{name}.")

    schema = json.loads((CHART / "values.schema.json").read_text())
    check(schema["properties"], yaml.safe_load((CHART / "values.yaml").read_text()), "")
    assert schema["additionalProperties"] is False


def test_the_tenants_component_gives_every_router_the_key_file() -> None:
    manifests = load("tenants")
    assert router_config(manifests).key_file == KEY_FILE
    assert router_config_of(asked(manifests).spec, ()).key_file.endswith("/keys.json")
    for name, template in pod_templates(manifests):
        mounts = {mount["mountPath"] for mount in template["spec"]["containers"][0].get("volumeMounts", [])}
        assert (str(Path(KEY_FILE).parent) in mounts) is (name in ("pdserve-launcher", "pdserve-router")), name
