"""The processes of a cluster, derived from its settings."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import GatewayConfig, HttpRouterConfig, RouterConfig, WorkerConfig, gateway_of
from pdserve.config_flags import live_flags, parse_flags
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.launch.changes.local_cluster import LocalCluster
from pdserve.launch.local import check_store
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import (
    ClusterSpec,
    fixed_ports,
    gateway,
    gateway_config,
    metrics_host,
    ports,
    processes,
    ray_resources,
    remote_ranks,
    router,
    router_config,
    waiting_env,
    why_not_placed,
    worker_config,
)
from pdserve.prefix.embedded import MAX_MEMORY_BYTES

WITH_TOKEN = {"router": {"token": "t"}}


def spec(**changes: Any) -> ClusterSpec:
    base: dict[str, Any] = {"model": "toy", "port": 50051, "redis": "redis://127.0.0.1:7/0", "cores": 2}
    base.update(changes)
    workers = base.get("prefill", 1) + base.get("decode", 1)
    base.setdefault("worker_ports", tuple(range(20_001, 20_001 + workers)))
    return ClusterSpec(**base)


@pytest.mark.parametrize(
    ("prefill", "decode", "names"),
    [
        (1, 1, ["p0", "d0", "router"]),
        (2, 3, ["p0", "p1", "d0", "d1", "d2", "router"]),
        (0, 1, ["d0", "router"]),
    ],
)
def test_workers_start_before_the_router(prefill: int, decode: int, names: list[str]) -> None:
    plan = processes(spec(prefill=prefill, decode=decode))
    assert [process.name for process in plan] == names
    router = plan[-1].config
    assert isinstance(router, RouterConfig)
    assert router.workers == tuple(f"127.0.0.1:{20_001 + index}" for index in range(prefill + decode))


def test_flags_parse_back_to_equal_settings() -> None:
    for process in processes(spec(settings={"worker": {"kv_blocks": 9}, "router": {"max_queue": 4}})):
        kind: Any = RouterConfig if process.module == "router" else WorkerConfig
        assert parse_flags(kind, process.argv[2:], prog="x") == process.config
        assert process.argv[:2] == ("-m", process.module)


@pytest.mark.parametrize(("cores", "workers", "share"), [(2, 2, 1), (8, 2, 4), (8, 3, 2), (2, 6, 1)])
def test_workers_of_a_host_share_its_cores(cores: int, workers: int, share: int) -> None:
    one = spec(cores=cores, prefill=1, decode=workers - 1)
    assert {worker_config(one, index)[1].threads for index in range(workers)} == {share}
    assert ("OMP_NUM_THREADS", str(share)) in processes(one)[0].env


def test_a_running_router_takes_other_addresses_of_workers() -> None:
    config = processes(spec(prefill=1, decode=1))[-1].config
    flags = [one for one in live_flags(config) if one.startswith("--workers=")]
    assert flags == ["--workers=127.0.0.1:20001,127.0.0.1:20002"]
    assert parse_flags(RouterConfig, ["--model=toy", *flags], prog="x").workers == config.workers  # type: ignore[union-attr]
    assert parse_flags(RouterConfig, ["--model=toy", "--workers="], prog="x").workers == ()


def test_routers_share_their_ports_alone() -> None:
    several = spec(routers=3, http=8000, metrics=9500, group="/run/x", settings={"router": {"record": "/r/run.jsonl"}})
    *_, first, second, third = processes(several)
    configs: list[Any] = [first.config, second.config, third.config]
    assert [one.name for one in (first, second, third)] == ["router-0", "router-1", "router-2"]
    assert [(one.router_id, one.member, one.group) for one in configs] == [
        (f"router-{member}", member, "/run/x") for member in range(3)
    ]
    assert {(one.port, gateway_of(one).port) for one in configs} == {(50051, 8000)}  # type: ignore[union-attr]
    assert [one.record for one in configs] == [f"/r/run-{member}.jsonl" for member in range(3)]
    metrics = [one.metrics_port for one in configs] + [gateway_of(one).metrics_port for one in configs]  # type: ignore[union-attr]
    workers = [one.config.metrics_port for one in processes(several)[:2]]
    assert sorted([*metrics, *workers]) == list(range(9501, 9501 + several.num_processes))
    listed = [port for _, _, port in ports(several, are_workers_here=True)]
    assert len(listed) == len(set(listed)), "each is held once"


def test_metrics_ports_of_routers_follow_a_given_one() -> None:
    several = spec(routers=2, http=8000, settings={"router": {"metrics_port": 9600}, "gateway": {"metrics_port": 9700}})
    configs: list[Any] = [one.config for one in processes(several)[-2:]]
    assert [one.metrics_port for one in configs] == [9600, 9601]
    assert [gateway_of(one).metrics_port for one in configs] == [9700, 9701]  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, 33])
def test_the_number_of_routers_is_bounded(count: int) -> None:
    with pytest.raises(ConfigError, match=r"routers: got .*, expected a number from 1 to 32"):
        spec(routers=count)


def test_a_gateway_process_has_one_router() -> None:
    with pytest.raises(ConfigError, match="`http_process` works with one router only"):
        spec(routers=2, http=8000, http_process=True)
    with pytest.raises(ConfigError, match=r"http_process: got True, expected http with it \(`--http PORT`\)"):
        spec(http_process=True)


def test_threads_spin_briefly_by_default() -> None:
    assert waiting_env({}) == {"GOMP_SPINCOUNT": "1000"}
    assert waiting_env({"GOMP_SPINCOUNT": "7", "HOME": "/"}) == {"GOMP_SPINCOUNT": "7"}
    assert waiting_env({"OMP_WAIT_POLICY": "ACTIVE"}) == {}


def test_a_roles_table_overrides_the_workers_table() -> None:
    one = spec(settings={"worker": {"max_batch": 8, "threads": 3}, "decode_worker": {"max_batch": 16}})
    assert [worker_config(one, index)[1].max_batch for index in (0, 1)] == [8, 16]
    assert worker_config(one, 0)[1].threads == 3


def test_each_worker_of_a_host_serves_metrics_on_a_port_of_its_own() -> None:
    one = spec(settings={"worker": {"metrics_port": 9100}})
    assert [worker_config(one, index)[1].metrics_port for index in (0, 1)] == [9100, 9101]


@pytest.mark.parametrize("http_process", [False, True])
def test_metrics_ports_follow_that_of_the_launcher(*, http_process: bool) -> None:
    one = spec(
        metrics=9500,
        http=8000,
        http_process=http_process,
        prefill=1,
        decode=2,
        host="0.0.0.0",
        insecure=True,
        settings=WITH_TOKEN,
    )
    *workers, own = (process.config for process in processes(one))
    http = gateway_of(own) if isinstance(own, RouterConfig) and not http_process else gateway_config(one)
    assert http is not None
    found = [config.metrics_port for config in (own, *workers, http)]
    assert found == [9501, 9502, 9503, 9504, 9505]
    assert {metrics_host(config) for config in (own, *workers, http)} == {"127.0.0.1"}


def test_explicit_metrics_ports_override_the_common_one() -> None:
    one = spec(metrics=9500, settings={"worker": {"metrics_port": 9100}, "router": {"metrics_port": 0}})
    assert [process.config.metrics_port for process in processes(one)] == [9100, 9101, 0]


def test_metrics_without_a_port_are_off() -> None:
    assert {process.config.metrics_port for process in processes(spec())} == {0}


def test_gpus_are_assigned_in_turn() -> None:
    def dealt(**changes: Any) -> list[str | None]:
        plan = processes(spec(prefill=2, decode=1, gpus=("0", "1"), **changes))
        return [dict(process.env).get("CUDA_VISIBLE_DEVICES") for process in plan]

    assert dealt() == ["0", "1", "0", None]
    assert dealt(settings={"worker": {"device": "cpu"}}) == [None, None, None, None]


def parallel(gpus: str, prefill: int, decode: int, **changes: Any) -> list[tuple[str | None, float]]:
    """Each worker's GPUs and its share of their memory."""
    degrees = {"prefill_worker": {"tensor_parallel": prefill}, "decode_worker": {"tensor_parallel": decode}}
    *workers, _ = processes(spec(gpus=tuple(gpus), settings={**degrees, **changes}))
    found = []
    for one in workers:
        assert isinstance(one.config, WorkerConfig)
        found.append((dict(one.env).get("CUDA_VISIBLE_DEVICES"), one.config.gpu_memory_share))
    return found


def test_each_rank_has_a_gpu() -> None:
    assert parallel("01234567", 4, 4) == [("0,1,2,3", 0.9), ("4,5,6,7", 0.9)]
    assert parallel("0123", 1, 2) == [("0", 0.9), ("1,2", 0.9)]
    assert parallel("01", 2, 2, worker={"device": "cpu"}) == [(None, 0.9), (None, 0.9)]
    with pytest.raises(ConfigError, match="tensor_parallel: got 4, expected at most 2 ranks: each needs a GPU"):
        parallel("01", 4, 1)


def test_ranks_on_other_hosts_use_no_local_gpu() -> None:
    remote = {"tensor_parallel": 4, "local_ranks": 2, "rendezvous": "10.0.0.1:7000", "insecure": True}
    one = spec(prefill=1, decode=2, gpus=tuple("012345"), worker_ports=(1, 2, 3), settings={"decode_worker": remote})
    *workers, router = processes(one)
    assert [dict(each.env)["CUDA_VISIBLE_DEVICES"] for each in workers] == ["0", "1,2", "3,4"]
    configs = [each.config for each in workers]
    assert [(each.host, getattr(each, "rendezvous", "")) for each in configs] == [
        ("127.0.0.1", ""),
        ("10.0.0.1", "10.0.0.1:7001"),
        ("10.0.0.1", "10.0.0.1:7002"),
    ]
    assert isinstance(router.config, RouterConfig)
    assert router.config.workers == ("127.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")
    assert fixed_ports(one, are_workers_here=True)[7001] == ("decode_worker.rendezvous", "10.0.0.1")
    assert ray_resources(worker_config(one, 1)[1], has_gpus=True)["GPU"] == 2.0


def test_every_port_of_this_host_is_listed_once() -> None:
    remote = {"tensor_parallel": 2, "local_ranks": 1, "rendezvous": "[::1]:7000", "metrics_port": 9000}
    one = spec(port=50051, http=8000, metrics=9500, worker_ports=(1, 2), settings={"decode_worker": remote})
    workers = [
        *[("port", "127.0.0.1", 1), ("metrics + 2", "127.0.0.1", 9502)],
        *[("port", "::1", 2), ("decode_worker.metrics_port", "::1", 9001), ("decode_worker.rendezvous", "::1", 7001)],
    ]
    others = [
        *[("port", "127.0.0.1", 50051), ("metrics + 1", "127.0.0.1", 9501)],
        *[("http", "127.0.0.1", 8000), ("metrics + 4", "127.0.0.1", 9504)],
    ]
    assert ports(one, are_workers_here=True) == workers + others
    assert ports(one, are_workers_here=False) == others
    assert fixed_ports(one, are_workers_here=False) == {9500: ("metrics", "127.0.0.1")} | {
        port: (name, host) for name, host, port in others
    }
    router = processes(one)[-1].config
    assert isinstance(router, RouterConfig)
    assert router.workers == ("127.0.0.1:1", "[::1]:2")


@pytest.mark.parametrize(("ranks", "here", "others"), [(8, 4, [4]), (8, 2, [2, 2, 2]), (8, 3, [3, 2]), (4, 0, [])])
def test_further_nodes_have_at_most_as_many_ranks(ranks: int, here: int, others: list[int]) -> None:
    remote = {"local_ranks": here, "rendezvous": "ray:7000", "insecure": True} if here else {}
    config = worker_config(spec(settings={"worker": {"tensor_parallel": ranks, **remote}}), 0)[1]
    assert remote_ranks(config) == others
    assert [ray_resources(config, has_gpus=True, ranks=count)["GPU"] for count in others] == others


def test_workers_on_one_gpu_divide_its_memory() -> None:
    assert parallel("0", 1, 1) == [("0", 0.45), ("0", 0.45)]
    assert parallel("012", 2, 2) == [("0,1", 0.45), ("2,0", 0.45)]
    asked = {"gpu_memory_share": 0.3}
    assert parallel("0", 1, 1, worker=asked) == [("0", 0.3), ("0", 0.3)]


@pytest.mark.parametrize(
    ("settings", "has_gpus", "gpus"),
    [
        ({"device": "cuda", "tensor_parallel": 4}, False, 4.0),
        ({"tensor_parallel": 2}, True, 2.0),
        ({}, True, 1.0),
        ({}, False, None),
        ({"device": "cpu", "tensor_parallel": 2}, True, None),
    ],
)
def test_ray_reserves_a_gpu_for_each_rank(settings: dict[str, Any], has_gpus: bool, gpus: float | None) -> None:
    config = worker_config(spec(settings={"worker": settings}), 0)[1]
    assert ray_resources(config, has_gpus=has_gpus).get("GPU") == gpus


@pytest.mark.parametrize(
    ("settings", "cpus"), [({}, 1.0), ({"threads": 4}, 4.0), ({"threads": 2, "tensor_parallel": 3}, 6.0)]
)
def test_ray_reserves_a_cpu_for_each_thread(settings: dict[str, Any], cpus: float) -> None:
    config = worker_config(spec(settings={"worker": settings}), 0)[1]
    assert ray_resources(config, has_gpus=False) == {"CPU": cpus}
    assert ray_resources(config, has_gpus=True)["CPU"] == max(1, settings.get("threads", 1))


def test_an_error_names_what_ray_lacks() -> None:
    bundles = [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}]
    said = why_not_placed(bundles, {"CPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, 10.0)
    assert "4 CPUs (2, 2) of which 1 of 4 are free and 1 GPUs (0, 1) of which 0 of 1 are free" in said
    assert "GPU" not in why_not_placed(bundles[:1], {}, {}, 10.0)


@pytest.mark.parametrize(("name", "value"), [("ray_strategy", "scatter"), ("ray_wait_s", 0.0)])
def test_settings_of_ray_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        spec(**{name: value})


def test_roles_are_reported_with_their_settings() -> None:
    assert [worker_config(spec(), index)[0] for index in (0, 1)] == [Role.PREFILL, Role.DECODE]


def test_a_token_is_passed_in_the_environment() -> None:
    router = processes(spec(settings={"router": {"token": "secret"}}))[-1]
    assert not any("secret" in word for word in router.argv)
    assert ("PDSERVE_TOKEN", "secret") in router.env


def test_the_cluster_secret_is_passed_in_the_environment() -> None:
    for process in processes(spec(cluster_secret="hidden")):
        assert not any("hidden" in word for word in process.argv)
        assert dict(process.env)["PDSERVE_CLUSTER_SECRET"] == "hidden"
        kind: Any = RouterConfig if process.module == "router" else WorkerConfig
        assert parse_flags(kind, process.argv[2:], prog="x", environ=dict(process.env)) == process.config


def test_workers_get_no_client_token() -> None:
    *workers, router = processes(spec(settings={"router": {"token": "secret"}}, cluster_secret="of the cluster"))
    assert [dict(one.env).get("PDSERVE_TOKEN") for one in (*workers, router)] == [None, None, "secret"]
    assert {dict(one.env)["PDSERVE_CLUSTER_SECRET"] for one in (*workers, router)} == {"of the cluster"}


def test_a_redis_password_is_on_no_command_line() -> None:
    for process in processes(spec(redis="redis://:pa55@127.0.0.1:7/0")):
        assert not any("pa55" in word or "--redis" in word for word in process.argv)
        kind: Any = RouterConfig if process.module == "router" else WorkerConfig
        assert parse_flags(kind, process.argv[2:], prog="x", environ=dict(process.env)) == process.config


@pytest.mark.parametrize("kind", [WorkerConfig, RouterConfig])
def test_a_process_rejects_a_password_in_a_flag(kind: Any) -> None:
    needed = ["--model=toy"] + (["--worker-id=w"] if kind is WorkerConfig else [])
    with pytest.raises(ConfigError, match="set PDSERVE_REDIS") as caught:
        parse_flags(kind, [*needed, "--redis=redis://:pa55@host:1/0"], prog="x", environ={})
    assert "pa55" not in str(caught.value)


def test_the_metrics_port_is_unique() -> None:
    with pytest.raises(ConfigError, match="another port: metrics has the same"):
        fixed_ports(spec(worker_ports=(), metrics=50051), are_workers_here=True)
    found = fixed_ports(spec(worker_ports=(), metrics=9500), are_workers_here=True)
    assert set(found) == {50051, 9500, 9501, 9502, 9503}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"router": {"metrics_port": 50051}}, "router.metrics_port"),
        ({"worker": {"metrics_port": 50051}}, "port"),
        ({"worker": {"metrics_port": 9100}, "router": {"metrics_port": 9101}}, "router.metrics_port"),
        (
            {"prefill_worker": {"metrics_port": 9101}, "decode_worker": {"metrics_port": 9100}},
            "decode_worker.metrics_port",
        ),
    ],
)
def test_no_two_processes_share_a_port(settings: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="another port") as caught:
        fixed_ports(spec(worker_ports=(), settings=settings), are_workers_here=True)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": -1}, "prefill"),
        ({"prefill": 1000}, "prefill"),
        ({"decode": 0}, "decode"),
        ({"metrics": 0}, "metrics"),
        ({"metrics": 65_532}, "metrics"),
        ({"settings": {"worker": {"kv_block": 1}}}, "worker.kv_block"),
        ({"settings": {"worker": {"kv_blocks": "many"}}}, "worker.kv_blocks"),
        ({"settings": {"worker": {"kv_blocks": True}}}, "worker.kv_blocks"),
        ({"settings": {"worker": {"redis": "redis://x"}}}, "worker.redis"),
        ({"settings": {"worker": {"cluster_secret": "s" * 16}}}, "worker.cluster_secret"),
        ({"settings": {"router": {"port": 1}}}, "router.port"),
        ({"settings": {"rooter": {}}}, "[rooter]"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(worker_ports=(), **changes)
    assert caught.value.field == field


def test_a_router_open_to_others_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="host"):
        processes(spec(host="0.0.0.0"))


def test_the_gateway_is_optional() -> None:
    assert gateway(spec(), "127.0.0.1:1") is None


def test_the_gateway_gets_redis_only_to_store_responses() -> None:
    for settings, redis in (({}, ""), ({"store_bytes": 9}, "redis://127.0.0.1:7/0")):
        one = spec(http=8000, settings={"gateway": settings}, redis="redis://127.0.0.1:7/0")
        found = gateway_config(one)
        assert found is not None
        assert found.redis == redis
        assert gateway_of(router(one, ()).config) == found


def test_the_gateway_is_in_the_routers_process() -> None:
    settings = {"gateway": {"max_connections": 7, "drain_s": 40.0}}
    one = spec(http=8000, settings=settings)
    process = router(one, ())
    assert process.argv[-3:] == ("--http", "--gateway-max-connections=7", "--gateway-drain-s=40.0")
    found = parse_flags(HttpRouterConfig, process.argv[2:], "x")
    assert found == process.config
    assert gateway_of(found) == gateway_config(one)
    assert "--gateway-drain-s=40.0" in live_flags(found)
    assert gateway(one, "127.0.0.1:1") is None


@pytest.mark.parametrize(
    "flags", [("--gateway-port=-1",), ("--gateway-host=0.0.0.0",), ("--gateway-max-body-bytes=1",)]
)
def test_a_wrong_setting_of_a_gateway_in_the_router_is_named(flags: tuple[str, ...]) -> None:
    name = flags[0].partition("=")[0][2:].replace("-", "_")
    with pytest.raises(ConfigError, match=f"^{name}: "):
        parse_flags(HttpRouterConfig, ("--model=toy", "--http", *flags), "x")


def test_the_gateway_has_its_own_table() -> None:
    process = gateway(
        spec(http=8000, http_process=True, settings={"gateway": {"max_connections": 7}}), "127.0.0.1:50051"
    )
    assert process is not None
    assert process.argv == ("-m", "pdserve.gateway", "--router=127.0.0.1:50051", "--max-connections=7")
    assert parse_flags(GatewayConfig, process.argv[2:], "x") == process.config


def test_the_gateways_port_is_unique() -> None:
    with pytest.raises(ConfigError, match="http: got 50051"):
        fixed_ports(spec(port=50051, http=50051), are_workers_here=True)
    with pytest.raises(ConfigError, match="http: got 65536"):
        spec(http=65_536)


def test_a_gateway_gets_no_secret() -> None:
    process = gateway(spec(http=0, http_process=True, settings={"router": {"token": "t"}}), "127.0.0.1:1")
    assert process is not None
    assert process.env == (("OMP_NUM_THREADS", "1"),)


def test_the_gateway_calls_the_router_by_its_socket() -> None:
    found = spec(http=8000, http_process=True, unix_socket="/run/0700/router.sock")
    process = gateway(found, "127.0.0.1:50051")
    assert process is not None
    assert isinstance(process.config, GatewayConfig)
    assert process.config.router == "unix:/run/0700/router.sock"
    assert router_config(found, ()).unix_socket == "/run/0700/router.sock"


def test_stored_responses_leave_the_embedded_redis_to_the_prefix_index() -> None:
    settings = {"gateway": {"store_bytes": MAX_MEMORY_BYTES // 4 + 1}}
    with pytest.raises(ConfigError, match="store_bytes"):
        LocalCluster(spec(http=8000, settings=settings, redis=""), LauncherReport())
    check_store(spec(http=8000, settings=settings))
    check_store(spec(http=8000, settings={"gateway": {"store_bytes": MAX_MEMORY_BYTES // 4}}, redis=""))
    check_store(spec(redis=""))
