"""LoRA adapters over HTTP, through OpenAI's client, and vLLM's endpoints that load and unload them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.client.results import Model
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.adapters import AdapterLimits
from pdserve.core.errors import UnknownModel
from pdserve.engine.adapters import read_adapter
from pdserve.engine.toy import answer
from pdserve.gateway.api.responses import responses_call
from pdserve.gateway.api.sdk_call import chat_call
from tests.support.adapters import write_adapter
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, serve

PROMPT = list(range(40, 60))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TOKEN = "operator-token-0123456789"
KEY = make_key(bytes(range(32)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(("a", "b")):
        write_adapter(root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[Served]:
    with serve(worker={"lora": (f"sql={folders / 'a'}",), "lora_folders": (str(folders),)}) as one:
        yield one


@pytest.fixture(scope="module")
def closed(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a token of the operator and a key of a tenant."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps({"tenants": {"acme": {"keys": [{"sha256": key_hash(KEY)}]}}}))
    worker = {"lora": (f"sql={folders / 'a'}",), "lora_folders": (str(folders),)}
    with serve(token=TOKEN, router={"key_file": str(file)}, worker=worker) as one:
        yield one


def text(folder: Path | None, max_tokens: int = 6) -> str:
    adapter = "" if folder is None else read_adapter("x", folder, AdapterLimits(512, 2**30)).fingerprint
    return bytes(answer(PROMPT, max_tokens, adapter=adapter)).decode()


def complete(client: openai.OpenAI, name: str) -> tuple[str, str]:
    found = client.completions.create(model=name, prompt=PROMPT, max_tokens=6, temperature=0)
    return found.model, found.choices[0].text


def completed(client: openai.OpenAI, name: str) -> tuple[str, str] | None:
    try:
        return complete(client, name)
    except openai.NotFoundError:
        return None


def send(served: Served, method: str, path: str, body: str | None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(served.address, timeout=60.0)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        found = connection.getresponse()
        return found.status, found.read().decode()
    finally:
        connection.close()


def ask(served: Served, path: str, token: str | None = None, **fields: Any) -> tuple[int, str]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return send(served, "POST", path, json.dumps(fields), content_type="application/json", **headers)


def test_a_completion_by_an_adapter_has_its_name_and_tokens(served: Served, folders: Path) -> None:
    assert complete(served.openai, "sql") == ("sql", text(folders / "a"))
    assert complete(served.openai, "toy") == ("toy", text(None))
    chunks = list(
        served.openai.completions.create(model="sql", prompt=PROMPT, max_tokens=6, temperature=0, stream=True)
    )
    assert {one.model for one in chunks} == {"sql"}
    assert "".join(one.choices[0].text for one in chunks) == text(folders / "a")


def test_models_lists_adapters_with_their_parent(served: Served) -> None:
    listed = {one.id: one.model_extra or {} for one in served.openai.models.list()}
    assert {name: (one["root"], one["parent"]) for name, one in listed.items()} == {
        "toy": ("toy", None),
        "sql": ("sql", "toy"),
    }
    found = served.openai.models.retrieve("sql")
    assert (found.id, found.object) == ("sql", "model")


def test_tokens_are_those_of_the_model(served: Served) -> None:
    for name in ("toy", "sql"):
        assert served.post("/tokenize", {"model": name, "prompt": "ab"})[0] == 200
        assert served.post("/detokenize", {"model": name, "tokens": [65]})[0] == 200
    assert served.post("/tokenize", {"model": "zzz", "prompt": "ab"})[0] == 404


def test_an_adapter_is_loaded_and_unloaded_as_in_vllm(served: Served, folders: Path) -> None:
    found = ask(served, LOAD, lora_name="hot", lora_path=str(folders / "b"))
    assert found == (200, "Success: LoRA adapter 'hot' added successfully.")
    assert complete(served.openai, "hot") == ("hot", text(folders / "b"))
    assert ask(served, LOAD, lora_name="hot", lora_path=str(folders / "a"), load_inplace=True)[0] == 200
    assert complete(served.openai, "hot") == ("hot", text(folders / "a"))
    found = ask(served, UNLOAD, lora_name="hot")
    assert found == (200, "Success: LoRA adapter 'hot' removed successfully.")
    with pytest.raises(openai.NotFoundError) as caught:
        complete(served.openai, "hot")
    assert caught.value.code == "model_not_found"
    assert "this server serves 'toy', 'sql'" in caught.value.message
    assert ask(served, UNLOAD, lora_name="hot")[0] == 404


def test_another_gateway_learns_the_name_of_a_new_adapter(served: Served, folders: Path) -> None:
    with gateway(served.router) as other:
        client = openai.OpenAI(base_url=f"http://{other.address}/v1", api_key="none", max_retries=0)
        assert complete(client, "toy")[0] == "toy"  # this gateway has read the names
        served.sdk.load_adapter("late", str(folders / "b"))
        until_s = time.monotonic() + WAIT_S
        while (found := completed(client, "late")) is None:  # the gateway reads them again at most once a second
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert found == ("late", text(folders / "b"))
        served.sdk.unload_adapter("late")
        with pytest.raises(openai.NotFoundError):
            complete(client, "late")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_path": "/x"}, "lora_name"),
        ({"lora_name": 1, "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/x", "other": 1}, "other"),
        ({"lora_name": "toy", "lora_path": "FOLDER/a"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "FOLDER/a"}, "lora_name"),
        ({"lora_name": "x" * 300, "lora_path": "FOLDER/a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "FOLDER/../a"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "FOLDER/absent"}, "lora_path"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
    ],
)
def test_bad_loads_are_rejected_by_field(served: Served, folders: Path, fields: dict[str, Any], field: str) -> None:
    given = {name: one.replace("FOLDER", str(folders)) if isinstance(one, str) else one for name, one in fields.items()}
    found = ask(served, LOAD, **given)
    assert found[0] == 400, found[1]
    assert json.loads(found[1])["error"]["param"] == field
    assert [one.id for one in served.openai.models.list()] == ["toy", "sql"]


def test_only_operators_load_and_unload(closed: Served, folders: Path) -> None:
    calls = ((LOAD, {"lora_name": "new", "lora_path": str(folders / "b")}), (UNLOAD, {"lora_name": "sql"}))
    for path, fields in calls:
        assert ask(closed, path, **fields)[0] == 401
        assert ask(closed, path, "wrong", **fields)[0] == 401
        assert ask(closed, path, KEY, **fields)[0] == 403
    tenant = openai.OpenAI(base_url=f"{closed.url}/v1", api_key=KEY, max_retries=0)
    assert complete(tenant, "sql") == ("sql", text(folders / "a"))
    for path, fields in calls:
        assert ask(closed, path, TOKEN, **fields)[0] == 200


def test_a_page_of_another_site_cannot_load(served: Served, folders: Path) -> None:
    body = json.dumps({"lora_name": "evil", "lora_path": str(folders / "b")})
    for headers in (
        {"content_type": "text/plain"},
        {"content_type": "application/json", "origin": "https://evil.example"},
        {"content_type": "application/json", "host": "evil.example"},
    ):
        assert send(served, "POST", LOAD, body, **headers)[0] in (400, 403)
    assert send(served, "GET", f"{LOAD}?lora_name=evil&lora_path={folders / 'b'}", None)[0] == 405


def test_nothing_is_loaded_by_default(toy: Served, folders: Path) -> None:
    found = ask(toy, LOAD, lora_name="x", lora_path=str(folders / "a"))
    assert found[0] == 400
    assert "worker.lora_folders is empty" in json.loads(found[1])["error"]["message"]
    assert [one.id for one in toy.openai.models.list()] == ["toy"]
    assert ask(toy, UNLOAD, lora_name="x")[0] == 404


def test_every_endpoint_passes_the_adapters_name() -> None:
    model = Model(
        name="base",
        max_context_tokens=64,
        max_new_tokens=32,
        vocab_size=300,
        eos_token_ids=(),
        has_chat_template=True,
        aliases=("alias",),
        adapters=("sql",),
    )
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for make, fields in ((chat_call, chat), (responses_call, {"input": "a"})):
        assert make({**fields, "model": "sql"}, model, {}).options["model"] == "sql"
        for name in ("base", "alias"):
            assert "model" not in make({**fields, "model": name}, model, {}).options
        with pytest.raises(UnknownModel):
            make({**fields, "model": "sql"}, replace(model, adapters=()), {})
