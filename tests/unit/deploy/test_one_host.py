"""The compose file and the systemd unit: every flag, port, name and secret exists, and all time limits fit."""

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.config import REDIS_ENV, SECRET_ENV, TOKEN_ENV, GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import parse_flags
from pdserve.launch.settings import bundled_model
from tests.unit.deploy.manifests import ROOT, container, load
from tests.unit.deploy.test_manifests import read_up

PROGRAMS: dict[str, tuple[str, Any]] = {
    "prefill": ("prefill_worker", WorkerConfig),
    "decode": ("decode_worker", WorkerConfig),
    "router": ("router", RouterConfig),
    "gateway": ("pdserve.gateway", GatewayConfig),
}
MOUNT = "/run/secrets/"
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
HELD = {"token": "t" * 32, "cluster-secret": "c" * 32, "redis-password": "p", "redis-url": "redis://:p@redis:6379/0"}


def words(name: str) -> list[str]:
    return [word.replace("${MODEL:-/models/bundled}", str(bundled_model())) for word in SERVICES[name]["command"]]


def config(name: str) -> Any:
    program, kind = PROGRAMS[name]
    start, flags = words(name)[:3], words(name)[3:]
    assert start == ["python", "-m", program]
    files = SERVICES[name].get("environment", {})
    assert sorted(files.values()) == sorted(MOUNT + one for one in SERVICES[name].get("secrets", []))
    environ = {one.removesuffix("_FILE"): HELD[path.removeprefix(MOUNT)] for one, path in files.items()}
    return parse_flags(kind, flags, program, environ)


def test_each_service_has_valid_flags_and_only_its_secrets() -> None:
    found = {name: config(name) for name in PROGRAMS}
    assert {found[name].redis for name in ("prefill", "decode", "router")} == {HELD["redis-url"]}
    assert {found[name].advertise for name in ("prefill", "decode")} == {"prefill", "decode"}
    assert found["router"].token == HELD["token"]
    assert found["gateway"].router == f"router:{found['router'].port}"
    assert "environment" not in SERVICES["gateway"]
    names = {one.removesuffix("_FILE") for service in SERVICES.values() for one in service.get("environment", {})}
    assert names == {REDIS_ENV, SECRET_ENV, TOKEN_ENV}


def test_every_name_in_the_compose_file_exists() -> None:
    secrets = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert secrets == set(COMPOSE["secrets"]) == set(HELD)
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        for one in service.get("depends_on", {}).values():
            assert one == {"condition": "service_healthy"}, name
        assert service["healthcheck"]["test"], name
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:8000:{config('gateway').port}"]
    build = SERVICES["router"]["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file()
    assert SERVICES["router"]["image"] == container(load(), "pdserve-router")["image"]
    comment = (ROOT / "deploy/compose.yaml").read_text().split("name: pdserve")[0]
    assert all(name in comment for name in HELD), "the first lines make every secret"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_health_check_asks_a_port_that_the_service_opens(name: str) -> None:
    found = config(name)
    [port] = re.findall(r"http://127.0.0.1:(\d+)/", SERVICES[name]["healthcheck"]["test"][-1])
    assert int(port) == (found.port if name == "gateway" else found.metrics_port)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_container_has_time_to_drain(name: str) -> None:
    assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= config(name).drain_s + 10


def test_redis_is_configured_as_on_kubernetes() -> None:
    kubernetes = container(load(), "pdserve-redis")
    assert (SERVICES["redis"]["image"], SERVICES["redis"]["command"]) == (kubernetes["image"], kubernetes["args"])


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((ROOT / "deploy/systemd/pdserve.service").read_text())
    return parser


def test_the_unit_starts_a_valid_command_with_its_secret_in_a_file(tmp_path: Path) -> None:
    service = unit()["Service"]
    program, command, *flags = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("pdserve", "up")
    text = (ROOT / "deploy/systemd/pdserve.service").read_text()
    credentials = dict(re.findall(r"^LoadCredential=(\S+?):(\S+)$", text, re.MULTILINE))
    assert set(credentials) == {"token", "settings.toml"}
    (tmp_path / "settings.toml").write_text("")
    (tmp_path / "token").write_text("t" * 32)
    environ = dict(one.split("=", 1) for one in shlex.split(service["Environment"].replace("%d", str(tmp_path))))
    found = read_up([one.replace("%d", str(tmp_path)) for one in flags], environ)
    assert found.spec.settings["router"]["token"] == "t" * 32
    assert found.spec.http == 8000


def test_the_unit_waits_until_requests_are_drained() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) >= RouterConfig(model="toy").drain_s + 20
    assert service["Type"] == "exec", "pdserve does not notify systemd"
