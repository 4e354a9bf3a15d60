"""Every manifest matches its published schema, refers only to existing objects, and has valid flags."""

import argparse
import atexit
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.scripts.scripts import start as ray_start
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from pdserve.cli import up
from pdserve.config import GatewayConfig, RouterConfig
from pdserve.config_flags import parse_flags
from pdserve.launch import settings
from pdserve.launch.ports import free_ports
from pdserve.launch.spec import ClusterSpec, ray_resources, worker_config
from pdserve.launch.spec import router_config as router_config_of
from pdserve.prefix.embedded import server_binary
from tests.support.tls_files import TestAuthority
from tests.unit.deploy.manifests import (
    ROOT,
    SECRET_MOUNT,
    Manifest,
    container,
    environment,
    expanded,
    load,
    pod_templates,
)

KUBERNETES = "1.33"
SECRETS = {
    "pdserve": {"token", "cluster-secret", "redis-password", "ray-token"}
}  # made by hand, as kustomization.yaml says
CLAIMS = {"models"}  # likewise, for gpu and vllm
VALUES = {"POD_NAME": "pdserve-router-7d9c5b8d6f-abcde"}
HELD = {name: f"the-{name}" for name in SECRETS["pdserve"]}
REDIS_URL = "redis://:the-redis-password@pdserve-redis:6379/0"
GPU = [("gpu",), ("gpu", "gpu-parallel")]
CPU = [(), ("vllm",)]
CHOSEN = [*CPU, ("gpu",), ("tls",), ("gpu", "gpu-parallel", "tls", "tenants")]
TLS_FOLDER = "/etc/pdserve/tls"
KEY_FILE = "/run/secrets/pdserve-tenants/keys.json"
MADE_BY_HAND = {"pdserve-tls", "pdserve-tenants", "pdserve"}  # as the values files say


def called(components: tuple[str, ...]) -> str:
    return "+".join(components) or "default"


@pytest.fixture(params=CHOSEN, ids=called)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return load(*request.param)


@pytest.fixture
def schemas() -> Any:
    """Kubernetes' own schemas, in the wheel of the dev extra; imported here so that its lack fails three tests."""
    return importlib.import_module("kubernetes_validate")


def named(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def launcher_words(manifests: list[Manifest]) -> list[str]:
    return expanded(container(manifests, "pdserve-launcher")["args"], VALUES)


@functools.cache
def secret_folder() -> str:
    """What the pods mount at TLS_FOLDER."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return str(Path(TestAuthority(folder).files("all", ("pdserve",)).cert).parent)


def asked(manifests: list[Manifest]) -> settings.Asked:
    """The config that the program reads from the launcher's arguments."""
    program, command, *words = launcher_words(manifests)
    assert (program, command) == ("pdserve", "up")
    with tempfile.TemporaryDirectory() as folder:
        (settings_file := Path(folder) / "settings.toml").write_text(
            named(manifests, "ConfigMap")["pdserve-settings"]["data"]["settings.toml"]
        )
        (key_file := Path(folder) / "keys.json").write_text('{"tenants": {}}')
        mounted = {
            TLS_FOLDER: secret_folder(),
            "/etc/pdserve/settings.toml": str(settings_file),
            KEY_FILE: str(key_file),
        }
        for inside, outside in mounted.items():
            words = [word.replace(inside, outside) for word in words]
        return read_up(words, environment(container(manifests, "pdserve-launcher"), HELD, VALUES))


def read_up(words: list[str], environ: dict[str, str]) -> settings.Asked:
    parser = argparse.ArgumentParser(exit_on_error=False)
    up.add_flags(parser)
    args = vars(parser.parse_args(words))
    flags = {name: value for name, value in args.items() if name not in up.NOT_SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        return settings.read(flags, Path(args["config"]) if args["config"] else None, args["set"])


def test_every_resource_matches_kubernetes_schemas(manifests: list[Manifest], schemas: Any) -> None:
    for one in manifests:
        if one["kind"] != "RayCluster":
            schemas.validate(one, KUBERNETES, strict=True)


def test_the_ray_cluster_and_its_pods_are_valid(manifests: list[Manifest], schemas: Any) -> None:
    [cluster] = named(manifests, "RayCluster").values()
    schema = json.loads((Path(__file__).parent / "schemas/raycluster.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(cluster)
    for name, template in pod_templates([cluster]):
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        schemas.validate(wrapped, KUBERNETES, strict=True)


def test_a_misspelt_field_would_be_found(manifests: list[Manifest], schemas: Any) -> None:
    deployment = named(manifests, "Deployment")["pdserve-router"]
    deployment["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment, KUBERNETES, strict=True)


def test_the_launchers_flags_are_valid(manifests: list[Manifest]) -> None:
    found = asked(manifests)
    assert found.ray == "auto"
    spec: ClusterSpec = found.spec
    router = router_config_of(spec, ())
    assert (router.token, router.redis) == ("the-token", REDIS_URL)
    ports = {port["name"]: port["containerPort"] for port in container(manifests, "pdserve-launcher")["ports"]}
    assert ports == {"grpc": router.port, "metrics": router.metrics_port}
    workers = [worker_config(spec, index)[1] for index in range(len(spec.worker_ids))]
    declared = {port["name"]: port["containerPort"] for port in container(manifests, "ray-workers")["ports"]}
    assert declared == {f"metrics-{one.worker_id}": one.metrics_port for one in workers}
    assert router.otlp == "pdserve-otel-collector:4317"


def router_config(manifests: list[Manifest]) -> RouterConfig:
    router = container(manifests, "pdserve-router")
    assert router["command"] == ["python", "-m", "router"]
    environ = environment(router, HELD, VALUES)
    return parse_flags(RouterConfig, expanded(router["args"], environ), "router", environ)


def gateway_config(manifests: list[Manifest]) -> GatewayConfig:
    gateway = container(manifests, "pdserve-gateway")
    assert gateway["command"] == ["python", "-m", "pdserve.gateway"]
    environ = environment(gateway, HELD, VALUES)
    return parse_flags(GatewayConfig, expanded(gateway["args"], environ), "gateway", environ)


def test_the_gateways_flags_are_valid(manifests: list[Manifest]) -> None:
    gateway, config = container(manifests, "pdserve-gateway"), gateway_config(manifests)
    assert config.gateway_id == VALUES["POD_NAME"]
    assert {port["name"]: port["containerPort"] for port in gateway["ports"]} == {
        "http": config.port,
        "metrics": config.metrics_port,
    }
    name, _, port = config.router.partition(":")
    [offered] = named(manifests, "Service")[name]["spec"]["ports"]
    assert (offered["port"], router_config(manifests).port) == (int(port), int(port))
    assert not {one["name"] for one in gateway["env"]} - {"POD_NAME"}, "a gateway holds no secret"


def test_the_gateway_is_alive_without_a_cluster_but_not_ready(manifests: list[Manifest]) -> None:
    gateway = container(manifests, "pdserve-gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    assert all("httpGet" not in gateway[probe] for probe in ("startupProbe", "livenessProbe"))


def test_the_ingress_sends_requests_to_the_gateway_unbuffered(manifests: list[Manifest]) -> None:
    [ingress] = named(manifests, "Ingress").values()
    [rule] = ingress["spec"]["rules"]
    assert [rule["host"]] == ingress["spec"]["tls"][0]["hosts"]
    [path] = rule["http"]["paths"]
    backend = path["backend"]["service"]
    assert backend["port"]["name"] in {
        port["name"] for port in named(manifests, "Service")[backend["name"]]["spec"]["ports"]
    }
    prefix = "nginx.ingress.kubernetes.io/"
    noted = {name.removeprefix(prefix): value for name, value in ingress["metadata"]["annotations"].items()}
    assert noted["proxy-buffering"] == "off"
    assert int(noted["proxy-read-timeout"]) >= router_config(manifests).request_timeout_s
    assert int(noted["proxy-body-size"].removesuffix("m")) * 2**20 == gateway_config(manifests).max_body_bytes
    has_tls = gateway_config(manifests).tls_cert != ""
    assert (noted.get("backend-protocol") == "HTTPS") is has_tls


def test_evictions_are_limited_for_every_pod_that_serves(manifests: list[Manifest]) -> None:
    limited = {
        pod
        for one in named(manifests, "PodDisruptionBudget").values()
        for pod in selects(one["spec"]["selector"]["matchLabels"], manifests)
    }
    assert limited == {"ray-head", "ray-workers", "pdserve-launcher", "pdserve-router", "pdserve-gateway"}


def test_egress_is_denied_but_to_pods_and_dns(manifests: list[Manifest]) -> None:
    [policy] = [one for one in named(manifests, "NetworkPolicy").values() if "Egress" in one["spec"]["policyTypes"]]
    pods, dns = policy["spec"]["egress"]
    assert pods == {"to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "pdserve"}}}]}
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    http = named(manifests, "NetworkPolicy")["pdserve-http"]["spec"]
    assert selects(http["podSelector"]["matchLabels"], manifests) == {"pdserve-gateway"}
    assert http["ingress"] == [{"ports": [{"protocol": "TCP", "port": gateway_config(manifests).port}]}]


def test_secrets_are_mounted_where_the_variables_point(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests):
        [only] = template["spec"]["containers"]
        files = [one["value"] for one in only.get("env", []) if one["name"].endswith("_FILE")]
        mounts = [one["mountPath"] + "/" for one in only.get("volumeMounts", []) if one["name"] == "secrets"]
        items = [
            SECRET_MOUNT + item["path"]
            for volume in template["spec"].get("volumes", [])
            if volume["name"] == "secrets"
            for item in volume["secret"]["items"]
        ]
        assert sorted(files) == sorted(items), name
        assert mounts == ([SECRET_MOUNT] if files else []), name


def test_the_routers_flags_are_valid(manifests: list[Manifest]) -> None:
    router, config = container(manifests, "pdserve-router"), router_config(manifests)
    assert config.router_id == VALUES["POD_NAME"]
    assert {port["containerPort"] for port in router["ports"]} == {config.port, config.metrics_port}
    spec = asked(manifests).spec
    assert (config.model, config.redis, config.cluster) == (spec.model, spec.redis, spec.cluster)


def test_ray_accepts_every_parameter(manifests: list[Manifest]) -> None:
    [cluster] = named(manifests, "RayCluster").values()
    script = container(manifests, "pdserve-launcher")["command"][2]
    [line] = re.findall(r"ray start .*", script)
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    said = [[f"--{name}={value}" for name, value in group["rayStartParams"].items()] for group in groups]
    for words in (line.split()[2:], *said):
        ray_start.make_context("start", words)
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in line.split()  # as KubeRay names the service


def test_ray_is_the_version_in_the_image(manifests: list[Manifest]) -> None:
    [cluster] = named(manifests, "RayCluster").values()
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert cluster["spec"]["rayVersion"] == pins["ray"]


def test_every_ray_node_has_the_same_token(manifests: list[Manifest]) -> None:
    for name in ("ray-head", "ray-workers", "pdserve-launcher"):
        variables = {one["name"]: one for one in container(manifests, name)["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token", name
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "pdserve", "key": "ray-token"}, name
        assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"]["value"] == "86400", name


def test_no_secret_is_on_a_command_line(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests):
        [only] = template["spec"]["containers"]
        words = json.dumps([only.get("command", []), only.get("args", [])])
        for variable, value in environment(only, HELD, VALUES).items():
            if any(held in value for held in HELD.values()):
                assert f"$({variable})" not in words, name


def test_ray_inherits_no_secret_of_pdserve(manifests: list[Manifest]) -> None:
    launcher = container(manifests, "pdserve-launcher")
    held = {
        name
        for name, value in environment(launcher, HELD, VALUES).items()
        if any(secret in value for key, secret in HELD.items() if key != "ray-token")
    }
    assert {name.removesuffix("_FILE") for name in re.findall(r"-u (\w+)", launcher["command"][2])} == held
    names = {one["name"] for one in launcher["env"]}
    assert set(re.findall(r"-u (\w+)", launcher["command"][2])) <= names


def test_redis_reads_its_password_from_standard_input(manifests: list[Manifest], tmp_path: Path) -> None:
    only = container(manifests, "pdserve-redis")
    (tmp_path / "redis-server").symlink_to(server_binary())
    words = expanded(only["args"], {})
    [port] = free_ports(1)
    server = subprocess.Popen(
        [*only["command"], *words, "--port", str(port), "--bind", "127.0.0.1"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment(only, HELD, VALUES)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert any("eady to accept connections" in line for line in server.stdout)
        with Redis(port=port, password=HELD["redis-password"]) as client:
            assert client.ping()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}
        with Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        if sys.platform == "linux":
            assert HELD["redis-password"].encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_probes_use_ports_that_ray_opens(manifests: list[Manifest]) -> None:
    [cluster] = named(manifests, "RayCluster").values()
    for group in cluster["spec"]["workerGroupSpecs"]:
        [only] = group["template"]["spec"]["containers"]
        port = int(group["rayStartParams"]["node-manager-port"])
        assert {only[probe]["tcpSocket"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}


def test_every_referenced_name_exists(manifests: list[Manifest]) -> None:
    services = named(manifests, "Service")
    text = json.dumps([template for _, template in pod_templates(manifests)])
    used = set(re.findall(r"(pdserve-[a-z-]+):(\d+)", text)) - {("pdserve-head-svc", "6379")}
    offered = {(name, str(port["port"])) for name, one in services.items() for port in one["spec"]["ports"]}
    assert used <= offered
    config_maps = set(named(manifests, "ConfigMap"))
    for name, template in pod_templates(manifests):
        [only] = template["spec"]["containers"]
        for variable in only.get("env", []):
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            assert secret is None or secret["key"] in SECRETS[secret["name"]], name
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        assert {mount["name"] for mount in only.get("volumeMounts", [])} == set(volumes), name
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name", "pdserve-otel-collector") in config_maps
            assert volume.get("secret", {}).get("secretName", "pdserve-tls") in MADE_BY_HAND
            for item in volume.get("secret", {}).get("items", []):
                assert item["key"] in SECRETS["pdserve"]
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "models") in CLAIMS


def selects(selector: dict[str, str], manifests: list[Manifest]) -> set[str]:
    return {
        name
        for name, template in pod_templates(manifests)
        if selector.items() <= template["metadata"]["labels"].items()
    }


def test_every_selector_matches_its_pods(manifests: list[Manifest]) -> None:
    services = {name: selects(one["spec"]["selector"], manifests) for name, one in named(manifests, "Service").items()}
    assert services == {
        "pdserve": {"pdserve-launcher", "pdserve-router"},
        "pdserve-http": {"pdserve-gateway"},
        "pdserve-redis": {"pdserve-redis"},
        "pdserve-otel-collector": {"pdserve-otel-collector"},
    }
    everything = {name for name, _ in pod_templates(manifests)}
    policies = named(manifests, "NetworkPolicy")
    assert selects(policies["pdserve-inside"]["spec"]["podSelector"]["matchLabels"], manifests) == everything
    assert selects(policies["pdserve-requests"]["spec"]["podSelector"]["matchLabels"], manifests) == services["pdserve"]
    for name, one in named(manifests, "Deployment").items():
        assert selects(one["spec"]["selector"]["matchLabels"], manifests) == {name}
    [scaler] = named(manifests, "HorizontalPodAutoscaler").values()
    assert scaler["spec"]["scaleTargetRef"]["name"] in named(manifests, "Deployment")


def test_service_ports_match_pod_ports(manifests: list[Manifest]) -> None:
    for one in named(manifests, "Service").values():
        for pod in selects(one["spec"]["selector"], manifests):
            names = {port["name"] for port in container(manifests, pod)["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= names


def test_every_pod_is_restricted_and_has_limits(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests):
        spec = template["spec"]
        [only] = spec["containers"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert only["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert "memory" in only["resources"]["limits"], name
        assert {"readinessProbe", "livenessProbe"} <= set(only), name
        assert not only["image"].endswith(":latest"), name
        assert ":" in only["image"], name


def test_the_images_version_is_current(manifests: list[Manifest]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = {container(manifests, name)["image"] for name, _ in pod_templates(manifests)}
    assert {image for image in ours if image.startswith("pdserve")} == {f"pdserve:{version}"}
    chart = yaml.safe_load((ROOT / "deploy/helm/Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version


def test_the_pods_have_time_to_drain(manifests: list[Manifest]) -> None:
    """After the preStop hook, which the grace period includes."""
    spec = asked(manifests).spec
    drain_s = {
        "pdserve-launcher": router_config_of(spec, ()).drain_s,
        "pdserve-router": router_config(manifests).drain_s,
        "pdserve-gateway": gateway_config(manifests).drain_s,
        "ray-workers": max(worker_config(spec, index)[1].drain_s for index in range(len(spec.worker_ids))),
    }
    for name, drained_s in drain_s.items():
        [pod] = [template["spec"] for found, template in pod_templates(manifests) if found == name]
        [only] = pod["containers"]
        [_, hook_s] = only["lifecycle"]["preStop"]["exec"]["command"] if "lifecycle" in only else ["sleep", "0"]
        assert pod["terminationGracePeriodSeconds"] >= int(hook_s) + drained_s + 10, name
        assert ("lifecycle" in only) is (name != "ray-workers"), "what a Service sends calls to waits first"


def test_the_gpu_overlay_changes_the_model_the_device_and_the_resources() -> None:
    plain, gpu = load(), load("gpu")
    assert container(gpu, "ray-workers")["resources"]["limits"]["nvidia.com/gpu"] == 1
    changed = set(launcher_words(gpu)) ^ set(launcher_words(plain))
    assert changed == {"--model=/models/bundled", "--model=/models/served", "--device=cuda"}
    [cluster] = named(gpu, "RayCluster").values()
    replicas: Any = cluster["spec"]["workerGroupSpecs"][0]["replicas"]
    assert replicas >= len(asked(gpu).spec.worker_ids)


def test_the_overlay_of_vllm_changes_the_model_the_engine_and_the_memory() -> None:
    plain, vllm = load(), load("vllm")
    changed = set(launcher_words(vllm)) ^ set(launcher_words(plain))
    assert changed == {"--model=/models/bundled", "--model=/models/served", "--engine=vllm"}
    spec = asked(vllm).spec
    workers = [worker_config(spec, index)[1] for index in range(len(spec.worker_ids))]
    assert {(one.engine, one.engine_python) for one in workers} == {("vllm", "")}, "in the image's own environment"
    limits = container(vllm, "ray-workers")["resources"]["limits"]
    assert limits == {**container(plain, "ray-workers")["resources"]["limits"], "memory": "16Gi"}


@pytest.mark.parametrize("components", GPU, ids=called)
def test_a_pod_has_the_gpus_of_a_worker(components: tuple[str, ...]) -> None:
    """Ranks of a worker share a host, and a pod's /dev/shm holds what NCCL lays there."""
    manifests = load(*components)
    spec = asked(manifests).spec
    [cluster] = named(manifests, "RayCluster").values()
    group: Any = cluster["spec"]["workerGroupSpecs"][0]
    in_pod = container(manifests, "ray-workers")["resources"]["limits"]["nvidia.com/gpu"]
    workers = [worker_config(spec, index)[1] for index in range(len(spec.worker_ids))]
    needs = [ray_resources(one, has_gpus=True)["GPU"] for one in workers]
    assert max(needs) <= in_pod
    assert len(needs) <= group["replicas"] * (in_pod // max(needs))
    [shm] = [one for one in group["template"]["spec"]["volumes"] if one["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == ("8Gi" if max(needs) > 1 else "1Gi")


@pytest.mark.parametrize("components", [*CPU, *GPU], ids=called)
def test_a_pod_has_the_cpus_of_a_worker(components: tuple[str, ...]) -> None:
    """Without a limit KubeRay tells Ray the requested CPUs. Ray places no worker on a pod that has fewer."""
    manifests = load(*components)
    spec = asked(manifests).spec
    in_pod = float(container(manifests, "ray-workers")["resources"]["requests"]["cpu"])
    workers = [worker_config(spec, index)[1] for index in range(len(spec.worker_ids))]
    assert max(ray_resources(one, has_gpus=components in GPU)["CPU"] for one in workers) <= in_pod


def test_the_tls_overlay_encrypts_all_ports() -> None:
    manifests = load("tls")
    text = json.dumps(manifests)
    assert "--insecure" not in text
    assert '"grpc": {"port"' not in text, "Kubernetes' gRPC probes do not speak TLS"
    spec = asked(manifests).spec
    router = container(manifests, "pdserve-router")
    environ = environment(router, HELD, VALUES)
    added = parse_flags(RouterConfig, expanded(router["args"], environ), "router", environ)
    first = router_config_of(spec, ())
    workers = [worker_config(spec, index)[1] for index in range(len(spec.worker_ids))]
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = getattr(added, name)
        assert path.startswith(TLS_FOLDER)
        found = {getattr(one, name).replace(secret_folder(), TLS_FOLDER) for one in (first, *workers)}
        assert found == {path}
        assert path == getattr(gateway_config(manifests), name)
    assert {one.tls_peer_name for one in (added, first, gateway_config(manifests), *workers)} == {"pdserve"}
    for name, template in pod_templates(manifests):
        mounts = {mount["mountPath"] for mount in template["spec"]["containers"][0].get("volumeMounts", [])}
        serves = name in ("pdserve-launcher", "pdserve-router", "pdserve-gateway", "ray-workers")
        assert (TLS_FOLDER in mounts) is serves, name
