"""Settings of `up`: file, flags, `--set` and environment."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import parse_flags, to_env, to_flags
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.setting import live_names
from pdserve.launch import settings
from pdserve.launch.keys import COMPUTED, KINDS
from pdserve.launch.report import LogLimits
from pdserve.launch.settings import bundled_model, merge
from pdserve.launch.spec import processes, router, served_names, worker_config


def read(flags: dict[str, Any] | None = None, text: str | None = None, *words: str, folder: Path) -> settings.Asked:
    file = None
    if text is not None:
        file = folder / "cluster.toml"
        file.write_text(text)
    return settings.read(flags or {}, file, words)


FILE = """
model = "toy"
prefill = 2
device = "cpu"
[worker]
kv_blocks = 64
[decode_worker]
max_batch = 4
[router]
max_queue = 7
"""


def test_a_file_configures_all_processes(tmp_path: Path) -> None:
    spec = read(None, FILE, folder=tmp_path).spec
    assert (spec.model, spec.prefill, spec.decode) == ("toy", 2, 1)
    _, decode = worker_config(spec, 2)
    assert (decode.kv_blocks, decode.max_batch, decode.device) == (64, 4, "cpu")
    assert spec.settings["router"] == {"max_queue": 7}


def test_flags_override_set_and_set_overrides_the_file(tmp_path: Path) -> None:
    spec = read({"prefill": 4}, FILE, "prefill=3", "decode=2", "worker.kv_blocks=5", folder=tmp_path).spec
    assert (spec.prefill, spec.decode, worker_config(spec, 0)[1].kv_blocks) == (4, 2, 5)


def test_a_set_value_that_is_not_toml_is_a_string(tmp_path: Path) -> None:
    asked = read(None, None, "model=toy", "cluster=blue", "worker.toy_step_s=0.5", folder=tmp_path)
    assert asked.spec.cluster == "blue"
    assert worker_config(asked.spec, 0)[1].toy_step_s == 0.5


def test_a_collector_reaches_the_router(tmp_path: Path) -> None:
    spec = read({"model": "toy", "otlp": "localhost:4317"}, folder=tmp_path).spec
    assert spec.settings["router"]["otlp"] == "localhost:4317"


def test_generation_config_is_a_setting_of_the_router(tmp_path: Path) -> None:
    spec = read({"model": "toy", "generation_config": "none"}, folder=tmp_path).spec
    assert spec.settings["router"]["generation_config"] == "none"
    with pytest.raises(ConfigError, match="generation_config"):
        read({"model": "toy", "generation_config": "some"}, folder=tmp_path)


def test_impossible_defaults_of_a_model_are_reported_at_once(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundled_model(), tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"top_p": 5}')
    with pytest.raises(ModelError, match="top_p: got 5"):
        read({"model": str(folder)}, folder=tmp_path)
    assert read({"model": str(folder), "generation_config": "none"}, folder=tmp_path).spec.model == str(folder)


def test_bounds_of_the_number_of_workers(tmp_path: Path) -> None:
    spec = read(None, 'model = "toy"\nautoscale = "4:8"\nroles = "auto"\n', folder=tmp_path).spec
    assert (spec.prefill, spec.decode, spec.is_automatic) == (1, 3, True), "enough at the start"
    assert not read({"model": "toy", "roles": "fixed"}, folder=tmp_path).spec.is_automatic
    for flags, field in (
        ({"autoscale": "4:8", "decode": 1}, "autoscale: got 4:8, expected bounds around the 2 workers of the start"),
        ({"autoscale": "1:1"}, "autoscale: got 1:1"),
        ({"autoscale": "8"}, "autoscale: got '8', expected MIN:MAX"),
        ({"roles": "some"}, "roles: got some"),
    ):
        with pytest.raises(ConfigError, match=re.escape(field)):
            read({"model": "toy", **flags}, folder=tmp_path)


@pytest.mark.parametrize(
    ("flags", "wait_s"),
    [
        ({"ray": "head:6379"}, 300.0),
        ({"ray": "head:6379", "ray_wait_s": 20.0}, 20.0),
        ({"ray": "head:6379", "autoscale": ""}, 10.0),
        ({"ray": ""}, 10.0),
    ],
)
def test_ray_has_time_to_start_nodes_that_a_controller_asks_for(
    flags: dict[str, Any], wait_s: float, tmp_path: Path
) -> None:
    spec = read({"model": "toy", "autoscale": "2:4", "roles": "auto", **flags}, folder=tmp_path).spec
    assert (spec.is_automatic, spec.ray_wait_s) == (True, wait_s)


def test_the_token_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "secret")
    assert read({"model": "toy"}, folder=tmp_path).spec.settings["router"]["token"] == "secret"


def test_each_start_makes_its_own_cluster_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CLUSTER_SECRET", raising=False)
    made = [read({"model": "toy"}, folder=tmp_path).spec.cluster_secret for _ in range(2)]
    assert made[0] != made[1]
    assert min(map(len, made)) == 64


def test_ranks_on_other_hosts_need_a_configured_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CLUSTER_SECRET", raising=False)
    remote = {"tensor_parallel": 2, "local_ranks": 1, "rendezvous": "10.0.0.1:7000", "insecure": True}
    with pytest.raises(ConfigError, match="cluster_secret: got nothing, expected one in PDSERVE_CLUSTER_SECRET, here"):
        read({"worker": remote}, folder=tmp_path)
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "one that both hosts know")
    assert read({"worker": remote}, folder=tmp_path).spec.cluster_secret == "one that both hosts know"


def test_the_cluster_secret_may_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("of the file\n")
    monkeypatch.delenv("PDSERVE_CLUSTER_SECRET", raising=False)
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET_FILE", str(file))
    assert read({"model": "toy"}, folder=tmp_path).spec.cluster_secret == "of the file"
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "of the environment")
    assert read({"model": "toy"}, folder=tmp_path).spec.cluster_secret == "of the environment"
    monkeypatch.delenv("PDSERVE_CLUSTER_SECRET")
    file.unlink()
    with pytest.raises(
        ConfigError, match=r"PDSERVE_CLUSTER_SECRET_FILE: got .*/secret, expected a file that can be read"
    ):
        read({"model": "toy"}, folder=tmp_path)


def test_without_a_model_the_bundled_one_is_served(tmp_path: Path) -> None:
    assert Path(read(folder=tmp_path).spec.model).name.startswith("stdlib-")


def test_a_model_folder_is_made_absolute_since_actors_work_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(settings.bundled_model())
    assert read({"model": "."}, folder=tmp_path).spec.model == str(Path.cwd())


def test_an_unknown_local_model_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: got some/model"):
        read({"model": "some/model"}, folder=tmp_path)
    assert read({"model": "/elsewhere", "ray": "head:6379"}, folder=tmp_path).spec.model == "/elsewhere"


def test_metrics_are_for_clusters_without_ray(tmp_path: Path) -> None:
    assert read({"model": "toy", "metrics": 9500}, folder=tmp_path).spec.metrics == 9500
    with pytest.raises(ConfigError, match=r"metrics: got 9500, .*worker\.metrics_port"):
        read({"model": "toy", "metrics": 9500, "ray": ""}, folder=tmp_path)


def test_only_visible_gpus_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert read({"model": "toy"}, folder=tmp_path).spec.gpus == ("3", "5")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("modle = 'toy'", "modle"),
        ("prefill = 'two'", "prefill"),
        ("prefill = true", "prefill"),
        ("[router]\nmax_que = 1", "router.max_que"),
        ("[router]\nmax_queue = 'many'", "router.max_queue"),
        ("[workers]\nkv_blocks = 1", "[workers]"),
        ("worker = 3", "worker"),
        ("this is no toml", "config"),
        ("decode = 0", "decode"),
        ("host = '0.0.0.0'", "host"),
        ("[worker]\nblock_size = 0", "worker.block_size"),
        ("prefill = 257", "prefill"),
        ("port = 70000", "port"),
        ("port = -1", "port"),
        ("cluster = 'a b'", "cluster"),
        ("device = 'tpu'", "device"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"model": "toy"}, text, folder=tmp_path)
    assert caught.value.field == field


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        settings.read({}, tmp_path / "nowhere.toml", ())


NUMBERS = [
    (kind, one)
    for kind, config in (("worker", WorkerConfig), ("router", RouterConfig))
    for one in dataclasses.fields(config)
    if str(one.type) in ("int", "float") and one.name not in ("port", "member", "members")  # set by the launcher alone
]


@pytest.mark.parametrize(("kind", "one"), NUMBERS, ids=lambda value: getattr(value, "name", value))
def test_every_number_has_a_range(kind: str, one: dataclasses.Field[Any], tmp_path: Path) -> None:
    is_float = str(one.type) == "float"
    for value in ("-2", *(("nan", "inf", "-inf", "1e9") if is_float else (str(2**62),))):
        with pytest.raises(ConfigError, match=f"{kind}.{one.name}: got .*, expected a number from") as caught:
            read({"model": "toy"}, None, f"{kind}.{one.name}={value}", folder=tmp_path)
        assert caught.value.field == f"{kind}.{one.name}"


@pytest.mark.parametrize(
    "key",
    ["router.slo_ttft_s", "router.request_timeout_s", "worker.heartbeat_s", "worker.lease_s", "worker.stall_s"],
)
def test_zero_is_no_duration(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        read({"model": "toy"}, None, f"{key}=0", folder=tmp_path)


def test_reports_come_before_silence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker.heartbeat_s: got 6.0, expected less than router.worker_silence_s"):
        read({"model": "toy"}, None, "worker.heartbeat_s=6.0", folder=tmp_path)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("router.max_que=1", "router.max_queue"),
        ("router.slo_ttft=1", "router.slo_ttft_s"),
        ("modle=toy", "model"),
        ("max_queue=4", "router.max_queue"),
        ("router.kv_blocks=4", "worker.kv_blocks"),
        ("kv_blocks=4", "worker.kv_blocks"),
        ("workers.kv_blocks=4", "[worker]"),
        ("decode_workers.max_batch=4", "[decode_worker]"),
    ],
)
def test_wrong_keys_get_a_suggestion(word: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"model": "toy"}, None, word, folder=tmp_path)
    assert f"did you mean {meant}?" in caught.value.message
    assert "Config" not in caught.value.message


@pytest.mark.parametrize("word", ["router.zzzzqqqq=1", "zzzzqqqq=1"])
def test_hopeless_keys_get_a_list(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"model": "toy"}, None, word, folder=tmp_path)
    assert "did you mean" not in caught.value.message
    assert "--help" in caught.value.message or "log_dir" in caught.value.message


@pytest.mark.parametrize("word", ["max_queue", "model.x=1", "=1"])
def test_an_invalid_set_is_rejected(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read({"model": "toy"}, "model = 'toy'", word, folder=tmp_path)


@pytest.mark.parametrize("place", ["top", "router"])
def test_a_key_file_goes_to_the_router_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys.json").write_text('{"tenants": {"acme": {}}}')
    given = {"key_file": "keys.json"}
    asked = read({"model": "toy", **(given if place == "top" else {"router": given})}, folder=tmp_path)
    router = asked.spec.settings["router"]
    assert router["key_file"] == str(tmp_path / "keys.json")
    assert len(str(router["token"])) == 64, "the launcher needs a token, to see the workers"


def test_a_key_file_leaves_the_operators_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "mine")
    (tmp_path / "keys.json").write_text("{}")
    asked = read({"model": "toy", "key_file": str(tmp_path / "keys.json")}, folder=tmp_path)
    assert asked.spec.settings["router"]["token"] == "mine"


@pytest.mark.parametrize("text", [None, "", '{"tenants": {"other": {}}}'])
def test_a_wrong_key_file_is_reported_before_anything_starts(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError):
        read({"model": "toy", "key_file": str(file)}, folder=tmp_path)


def test_a_recording_goes_to_the_router_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = read({"record": "here.jsonl", "model": "toy"}, folder=tmp_path)
    assert asked.spec.settings["router"]["record"] == str(tmp_path / "here.jsonl")


def test_faults_are_injected_only_by_the_flag(tmp_path: Path) -> None:
    plan = "seed=3,share=0.5,drop=1"
    asked = read({"model": "toy", "inject_faults": plan}, folder=tmp_path)
    configs = [one.config for one in processes(asked.spec) if one.module != "router"]
    assert [getattr(config, "inject_faults", None) for config in configs] == [plan, plan]
    plain = [one.config for one in processes(read({"model": "toy"}, folder=tmp_path).spec)]
    assert not any(getattr(config, "inject_faults", "") for config in plain)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('inject_faults = "drop=1"', ()),
        ('[worker]\ninject_faults = "drop=1"', ()),
        ("", ("inject_faults=drop=1",)),
        ("", ("decode_worker.inject_faults=drop=1",)),
    ],
)
def test_a_file_or_set_cannot_inject_faults(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inject_faults"):
        read({"model": "toy"}, text, *words, folder=tmp_path)


def test_a_fault_plan_is_checked_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="explode"):
        read({"model": "toy", "inject_faults": "explode=1"}, folder=tmp_path)


def test_an_unknown_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router.policy: got fastest, expected one of .*goodput"):
        read({"model": "toy"}, None, "router.policy=fastest", folder=tmp_path)


def test_the_documented_settings_file_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/getting-started.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "llama").symlink_to(settings.bundled_model())
    text = text.replace("# model", "model").replace("/models/llama", str(tmp_path / "llama"))
    spec = read(None, text, folder=tmp_path).spec
    assert spec.model == str(tmp_path / "llama")
    assert (spec.http, spec.settings) == (8000, {"worker": {"kv_dtype": "int8"}})
    assert spec.prefill + spec.decode <= 2, "two cores suffice, so a laptop gets no warning"


URL = "redis://:pa55@127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("flags", "word", "variable"),
    [
        ({}, "router.token=pa55", "PDSERVE_TOKEN"),
        ({}, f"redis={URL}", "PDSERVE_REDIS"),
        ({"redis": URL}, "prefill=1", "PDSERVE_REDIS"),
    ],
)
def test_command_lines_hold_no_secret(flags: dict[str, Any], word: str, variable: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"set {variable}, or name its file in {variable}_FILE") as caught:
        read({"model": "toy", **flags}, None, word, folder=tmp_path)
    assert "pa55" not in str(caught.value)


def test_secrets_come_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, held in (("PDSERVE_TOKEN", "secret"), ("PDSERVE_REDIS", URL)):
        (tmp_path / name).write_text(held + "\n")
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / name))
    spec = read({"model": "toy"}, folder=tmp_path).spec
    assert (spec.settings["router"]["token"], spec.redis) == ("secret", URL)


def test_a_redis_in_a_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_REDIS", "redis://elsewhere/0")
    assert read({"model": "toy"}, f"redis = '{URL}'", folder=tmp_path).spec.redis == URL


def test_configs_do_not_print_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_TOKEN", "PDSERVE_CLUSTER_SECRET"):
        monkeypatch.setenv(name, "pa55")
    monkeypatch.setenv("PDSERVE_REDIS", URL)
    monkeypatch.setenv("PDSERVE_KV_STORE", URL)
    for process in processes(read({"model": "toy"}, folder=tmp_path).spec):
        assert "pa55" not in repr(process.config)


def test_the_store_of_the_environment_is_that_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_KV_STORE", URL)
    workers = [one for one in processes(read({"model": "toy"}, folder=tmp_path).spec) if "worker" in one.module]
    assert len(workers) == 2
    for process in workers:
        assert process.config.kv_store == URL  # type: ignore[union-attr]
        assert not [flag for flag in to_flags(process.config) if "kv-store" in flag]
        assert to_env(process.config)["PDSERVE_KV_STORE"] == URL


@pytest.mark.parametrize(
    ("shared", "own", "is_refused"),
    [("", URL, True), (URL, "", True), (URL, URL, False), (URL, "file:///kv", False), ("", "file:///kv", False)],
)
def test_workers_of_ray_have_one_store_with_a_password(shared: str, own: str, is_refused: bool, tmp_path: Path) -> None:
    stores = f"[worker]\nkv_store = '{shared}'\n[decode_worker]\nkv_store = '{own}'\n"
    read({"model": "toy"}, stores, folder=tmp_path)
    if not is_refused:
        read({"model": "toy", "ray": "local"}, stores, folder=tmp_path)
        return
    with pytest.raises(ConfigError, match="one URL for all workers") as caught:
        read({"model": "toy", "ray": "local"}, stores, folder=tmp_path)
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_model_folder_is_checked_before_the_start(missing: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(settings.bundled_model(), folder)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        read({"model": str(folder)}, folder=tmp_path)


def test_a_broken_tokenizer_is_rejected_before_workers_load(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(settings.bundled_model(), folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        read({"model": str(folder)}, folder=tmp_path)


def test_a_recording_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record: got .*nowhere.*, expected a file that can be written"):
        read({"model": "toy", "record": str(tmp_path / "nowhere/r.jsonl")}, folder=tmp_path)


def test_a_config_that_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: got .*, expected a file that can be read"):
        settings.read({}, tmp_path, ())


@pytest.mark.parametrize(
    "word",
    [
        "router.record=/nowhere/r.jsonl",
        "router.tls_cert=/nowhere/tls.crt",
        "gateway.router_cert=/nowhere/tls.crt",
        "worker.tls_ca=/",
        "otlp=localhost",
        "otlp=localhost:0",
        "otlp=localhost:otlp",
        "otlp=:4317",
        "otlp=ftp://localhost:4317",
        "router.otlp=http://localhost",
        "otlp=::1",
    ],
)
def test_paths_and_endpoints_are_checked_before_loading(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0].rpartition(".")[2]):
        settings.read({"model": "toy"}, None, [word])


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://collector:4317", "https://[::1]:4317/", "[::1]:4317"])
def test_collectors_with_a_port_are_accepted(endpoint: str) -> None:
    settings.read({"model": "toy", "otlp": endpoint}, None, [])


def test_log_files_have_limits_of_size_and_number(tmp_path: Path) -> None:
    asked = read(None, 'model = "toy"\nlog_dir = "logs"\nlog_max_bytes = 8192', "log_files=2", folder=tmp_path)
    assert asked.log_limits == LogLimits(log_max_bytes=8192, log_files=2)
    assert read({"model": "toy"}, folder=tmp_path).log_limits == LogLimits()


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("log_max_bytes=4095", "log_max_bytes"),
        ("log_max_bytes=-1", "log_max_bytes"),
        ("log_files=1001", "log_files"),
        ("log_files=-1", "log_files"),
        ("log_files=1.5", "log_files"),
        ("log_files=true", "log_files"),
    ],
)
def test_limits_of_log_files_have_ranges(word: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        read({"model": "toy", "log_dir": str(tmp_path)}, None, word, folder=tmp_path)


RUNNING = """
model = "toy"
log_level = "info"
[router]
slo_ttft_s = 1.0
max_queue = 7
[worker]
drain_s = 5.0
"""


def test_running_clusters_take_live_settings(tmp_path: Path) -> None:
    running = read(None, RUNNING, folder=tmp_path)
    text = """
model = "toy"
prefill = 2
log_level = "debug"
log_files = 3
host = "127.0.0.2"
[router]
slo_tpot_s = 0.5
max_queue = 8
[worker]
drain_s = 6.0
kv_blocks = 64
[gateway]
body_s = 3.0
"""
    merged, changed, fixed = merge(running, read(None, text, folder=tmp_path))
    assert changed == [
        *("log_level", "log_limits", "worker.drain_s"),
        *("router.slo_tpot_s", "router.slo_ttft_s", "gateway.body_s"),
    ]
    assert sorted(fixed) == ["host", "prefill", "router.max_queue", "worker.kv_blocks"]
    assert (merged.log_level, merged.log_limits, merged.log_dir) == ("debug", LogLimits(log_files=3), None)
    assert merged.spec.settings == {
        "router": {"slo_tpot_s": 0.5, "max_queue": 7},
        "worker": {"drain_s": 6.0},
        "gateway": {"body_s": 3.0},
    }
    assert (merged.spec.prefill, merged.spec.host) == (1, "127.0.0.1")


def test_the_same_settings_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also secrets, which are new at each reading."""
    keys = tmp_path / "keys.toml"
    keys.write_text("{}")
    monkeypatch.setenv("PDSERVE_REDIS", "redis://127.0.0.1:1")
    for text in (RUNNING, f'model = "toy"\ntls = "auto"\nkey_file = "{keys}"'):
        first, second = read(None, text, folder=tmp_path), read(None, text, folder=tmp_path)
        assert merge(first, second) == (first, [], [])


@pytest.mark.parametrize("field", ["token", "redis", "cluster_secret"])
@pytest.mark.parametrize("before", ["", "first-secret-of-20-chars"])
def test_a_changed_secret_is_named(field: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the environment may have new content, and a token may also be in the settings' file."""
    name = {"token": "router.token"}.get(field, field)
    file = tmp_path / "secret"
    for env in ("PDSERVE_TOKEN", "PDSERVE_REDIS", "PDSERVE_CLUSTER_SECRET"):
        monkeypatch.delenv(env, raising=False)
    monkeypatch.setenv(f"PDSERVE_{field.upper()}_FILE", str(file))
    file.write_text(before)
    running = read(None, RUNNING, folder=tmp_path)
    file.write_text("another-secret-of-20")
    wanted = read(None, RUNNING, folder=tmp_path)
    assert merge(running, wanted) == (running, [], [name])
    if field != "cluster_secret":  # which no table has
        text = {"token": RUNNING.replace("[router]", '[router]\ntoken = "a-third-secret-of-20"')}
        text["redis"] = 'redis = "redis://:p@127.0.0.1:1"' + RUNNING
        assert merge(running, read(None, text[field], folder=tmp_path)) == (running, [], [name])


def test_a_secret_whose_file_is_gone_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "PDSERVE_TOKEN", "PDSERVE_CLUSTER_SECRET", "PDSERVE_REDIS"
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / name))
        (tmp_path / name).write_text("redis://:p@127.0.0.1:1" if name == "PDSERVE_REDIS" else "a-secret-of-20-chars")
    running = read(None, RUNNING, folder=tmp_path)
    assert running.unread == ()
    for name in names:
        (tmp_path / name).unlink()
    text = tmp_path / "cluster.toml"
    text.write_text(RUNNING.replace("1.0", "2.0"))
    wanted = settings.read({}, text, (), earlier=running)
    assert [why.partition(":")[0] for why in wanted.unread] == [f"{name}_FILE" for name in names]
    merged, changed, fixed = merge(running, wanted)
    assert (fixed, merged.unread) == ([], ())
    assert changed == ["router.slo_ttft_s"]
    with pytest.raises(ConfigError, match=r"PDSERVE_TOKEN_FILE"):
        settings.read({}, text, ())


def test_a_token_beside_a_key_file_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_TOKEN", raising=False)
    keys = tmp_path / "keys.toml"
    keys.write_text("{}")
    text = f'model = "toy"\nkey_file = "{keys}"\n'
    running, wanted = (
        read(None, one, folder=tmp_path) for one in (text, text + '[router]\ntoken = "secret-of-20-chars-"')
    )
    assert merge(running, wanted) == (running, [], ["router.token"])
    assert merge(wanted, running) == (wanted, [], ["router.token"])


def test_workers_of_ray_take_no_new_settings(tmp_path: Path) -> None:
    running = read({"ray": ""}, RUNNING, folder=tmp_path)
    wanted = read({"ray": ""}, RUNNING.replace("5.0", "6.0").replace("info", "debug"), folder=tmp_path)
    merged, changed, fixed = merge(running, wanted)
    assert (changed, fixed) == (["log_level"], ["worker.drain_s", "log_level of Ray's workers"])
    assert merged.spec.settings == running.spec.settings


@pytest.mark.parametrize("kind", KINDS)
def test_each_live_setting_changes(kind: str, tmp_path: Path) -> None:
    running = read({"model": "toy"}, folder=tmp_path)
    names = live_names({"router": RouterConfig, "gateway": GatewayConfig}.get(kind, WorkerConfig))
    for name in (one for one in names if one not in COMPUTED):
        value = {"trace_share": 0.5, "stream_interval_s": 0.05}.get(name, 1025)
        wanted = read({"model": "toy"}, None, f"{kind}.{name}={value}", folder=tmp_path)
        merged, changed, fixed = merge(running, wanted)
        assert (merged.spec.settings, changed, fixed) == (wanted.spec.settings, [f"{kind}.{name}"], [])


@pytest.mark.parametrize(
    ("flags", "text", "words"),
    [
        ({"served_model_name": ("a/b", "c")}, None, ()),
        ({"served_model_name": ("a/b", "c")}, 'served_model_name = "x"', ("served_model_name=y",)),
        ({}, 'served_model_name = ["a/b", "c"]', ()),
        ({}, '[router]\nserved_model_name = ["a/b", "c"]', ()),
        ({}, None, ("served_model_name=a/b,c",)),
        ({}, None, ("router.served_model_name=a/b,c",)),
    ],
)
def test_served_names_are_settings_of_the_router(
    flags: dict[str, Any], text: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    spec = read({"model": "toy", **flags}, text, *words, folder=tmp_path).spec
    assert served_names(spec) == ("a/b", "c")
    assert router(spec, ()).argv.count("--served-model-name=a/b,c") == 1
    assert served_names(read({"model": "toy"}, folder=tmp_path).spec) == ("toy",)


@pytest.mark.parametrize(
    "value",
    [
        str([f"m{number}" for number in range(65)]),
        '["a", "a"]',
        '["a b"]',
        '["a,b"]',
        '["a\\n"]',
        '["a\\u0000"]',
        '["\\ufeff"]',
        '[""]',
        "[1]",
        "3",
        "{}",
        f'["{"a" * 257}"]',
    ],
)
@pytest.mark.parametrize("table", ["", "[router]\n"])
def test_wrong_served_names_are_rejected(value: str, table: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        read({"model": "toy"}, f"{table}served_model_name = {value}", folder=tmp_path)


@pytest.mark.parametrize(
    ("model", "word", "expected"),
    [
        ("toy", "worker.engine=torch", "worker.engine: got torch, expected auto or toy: the model toy has no weights"),
        ("toy-marked", "decode_worker.engine=torch", "decode_worker.engine: got torch, expected auto or toy"),
        ("stdlib-5m", "prefill_worker.engine=toy", "prefill_worker.engine: got toy, expected the same engine for all"),
        ("stdlib-5m", "decode_worker.engine=toy", "decode_worker.engine: got toy, expected the same engine for all"),
        ("toy", "worker.tensor_parallel=2", "worker.tensor_parallel: got 2, expected 1: a toy has nothing to divide"),
    ],
)
def test_an_engine_that_cannot_serve_the_model_is_refused_before_the_start(
    tmp_path: Path, model: str, word: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"model": model}, None, word, folder=tmp_path)
    assert str(caught.value).startswith(expected)


def test_an_adapter_with_the_models_name_is_refused(tmp_path: Path) -> None:
    """Requests for it would get the model."""
    for model, names in (("toy", ()), ("sql", ("sql",))):
        flags = {"model": "toy", "served_model_name": names} if names else {"model": "toy"}
        with pytest.raises(ConfigError, match="a name other than the model's") as caught:
            settings.read(flags, None, [f"decode_worker.lora=other=/x,{model}=/y"])
        assert (caught.value.field, caught.value.seen) == ("decode_worker.lora", f"{model}=/y")


@pytest.mark.parametrize("prefill", [0, 1])
def test_vllm_workers_of_different_degrees_are_refused_before_the_start(
    tmp_path: Path, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing knows in which order vLLM stores the heads of a block."""
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    text = f'prefill = {prefill}\n[worker]\nengine = "vllm"\nengine_python = "{sys.executable}"\n'
    text += "[prefill_worker]\ntensor_parallel = 2\n"
    if not prefill:
        assert read({}, text, folder=tmp_path).spec.prefill == 0
        return
    with pytest.raises(ConfigError, match="exchange KV only at equal degrees") as caught:
        read({}, text, folder=tmp_path)
    assert (caught.value.field, caught.value.seen) == ("prefill_worker.tensor_parallel", 2)
    assert read({}, text + "[decode_worker]\ntensor_parallel = 2\n", folder=tmp_path).spec.model


@pytest.mark.parametrize("word", ["worker.engine=toy", "prefill_worker.engine=toy", "worker.engine=auto"])
def test_an_engine_that_can_serve_the_model_is_accepted(tmp_path: Path, word: str) -> None:
    assert read({"model": "toy"}, None, word, folder=tmp_path).spec.model == "toy"


@pytest.mark.parametrize(
    "text",
    [
        '[worker]\nengine = "absent"\n[prefill_worker]\nengine = "toy"\n[decode_worker]\nengine = "auto"\n',
        'prefill = 0\n[worker]\nengine = "absent"\n[decode_worker]\nengine = "toy"\n',
        '[worker]\nengine = "torch"\n[prefill_worker]\nengine = "toy"\n[decode_worker]\nengine = "toy"\n',
        'prefill = 0\n[prefill_worker]\nengine = "absent"\n',
    ],
)
def test_an_engine_that_no_worker_gets_is_not_checked(tmp_path: Path, text: str) -> None:
    assert read({"model": "toy"}, text, folder=tmp_path).spec.model == "toy"


def test_an_engine_that_one_role_gets_is_checked(tmp_path: Path) -> None:
    text = '[worker]\nengine = "absent"\n[prefill_worker]\nengine = "toy"\n'
    with pytest.raises(ConfigError, match="engine: got absent, expected auto, or an installed engine"):
        read({"model": "toy"}, text, folder=tmp_path)


# --- LoRA adapters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[worker]\nlora = ["a=/x/a b", "b=/y"]\nlora_folders = "/x"', ()),
        (None, ("worker.lora=a=/x/a b,b=/y", "worker.lora_folders=/x")),
    ],
)
def test_adapters_are_settings_of_workers(text: str | None, words: tuple[str, ...], tmp_path: Path) -> None:
    for process in processes(read({"model": "toy"}, text, *words, folder=tmp_path).spec)[:-1]:
        config = process.config
        assert isinstance(config, WorkerConfig)
        assert (config.lora, config.lora_folders) == (("a=/x/a b", "b=/y"), ("/x",))
        assert parse_flags(WorkerConfig, to_flags(config), "worker").lora == config.lora


@pytest.mark.parametrize(
    "values",
    [
        {"lora": ["a"]},
        {"lora": ["a="]},
        {"lora": ["=b"]},
        {"lora": ["a=b,c"]},
        {"lora": ["a=b\n"]},
        {"lora": ["a b=c"]},
        {"lora": ["a\u0000=c"]},
        {"lora": ["a" * 257 + "=b"]},
        {"lora": ["a=b", "a=c"]},
        {"lora": ["a=b", "c=d"], "max_lora_adapters": 1},
        {"lora_folders": [""]},
        {"lora_folders": ["a,b"]},
        {"max_loras": 0},
        {"max_lora_rank": 513},
        {"max_lora_adapters": 4097},
        {"max_lora_bytes": 0},
    ],
)
def test_wrong_adapter_settings_are_rejected(values: dict[str, Any]) -> None:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    with pytest.raises(ConfigError, match="lora"):
        WorkerConfig(model="toy", worker_id="w", **given)


@pytest.mark.parametrize(
    ("flags", "text", "given"),
    [
        ({"lora": ("a=rel", "b=/abs"), "lora_folders": ("loras",)}, None, ()),
        ({}, 'lora = ["a=rel", "b=/abs"]\nlora_folders = "loras"', ()),
        ({}, '[worker]\nlora = ["a=rel", "b=/abs"]\nlora_folders = ["loras"]', ()),
        ({}, None, ("lora=a=rel,b=/abs", "lora_folders=loras")),
    ],
)
def test_adapters_are_settings_of_the_workers(
    flags: dict[str, Any], text: str | None, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folders are absolute, because workers may run in another working directory."""
    monkeypatch.chdir(tmp_path)
    spec = read({"model": "toy", **flags}, text, *given, folder=tmp_path).spec
    table = spec.settings["worker"]
    assert table["lora"] == (f"a={tmp_path}/rel", "b=/abs")
    assert table["lora_folders"] == (f"{tmp_path}/loras",)
