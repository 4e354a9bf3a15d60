"""Which cached prefixes tenants share on live workers, according to the allocators and the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve import Client, InvalidRequest
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.testing import Cluster
from router.service.tenants import MAX_SALT_CHARS, cache_salt

ACME, BETA = (make_key(bytes([number] * 32)) for number in range(2))
SECRET = ClusterSecret("a secret of this test")
OTHER_SECRET = ClusterSecret("another secret of this test")
PROMPT = [33 + (7 * i) % 90 for i in range(16 * 6 + 5)]  # six full blocks, and a part of one


def test_salts_differ_by_tenant_salt_and_cluster() -> None:
    given: list[tuple[ClusterSecret, str, str | None]] = [
        (SECRET, "", "x"),
        (SECRET, "acme", None),
        (SECRET, "acme", "x"),
        (SECRET, "acme", "y"),
        (SECRET, "acmex", None),
        (SECRET, "beta", None),
        (OTHER_SECRET, "acme", None),
    ]
    salts = {cache_salt(*one) for one in given}
    assert len(salts) == len(given)
    assert {len(one) for one in salts} == {32}
    assert cache_salt(SECRET, "acme", "x") == cache_salt(SECRET, "acme", "x")


def test_a_salt_names_the_adapter() -> None:
    given: list[tuple[ClusterSecret | None, str, str | None]] = [
        (None, "", None),
        (SECRET, "", "x"),
        (SECRET, "acme", None),
        (SECRET, "acme", "x"),
    ]
    salts = {cache_salt(*one, adapter) for one in given for adapter in ("", "1" * 32, "2" * 32)}
    assert len(salts) == 12
    assert {len(one) for one in salts} == {0, 32}
    assert cache_salt(None, "", None, "1" * 32) == cache_salt(SECRET, "", None, "1" * 32), "routers agree"


def test_the_default_tenant_has_an_empty_salt() -> None:
    assert cache_salt(SECRET, "", None) == cache_salt(None, "", None) == b""


@pytest.mark.parametrize("given", ["", "x" * (MAX_SALT_CHARS + 1)])
def test_a_salt_has_a_limited_length(given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        cache_salt(SECRET, "acme", given)
    assert caught.value.field == "cache_salt"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {name: {"keys": [{"sha256": key_hash(key)}]} for name, key in (("acme", ACME), ("beta", BETA))}
    file.write_text(json.dumps({"tenants": tenants}))
    router = {"key_file": str(file), "token": "operator", "slo_ttft_s": 120.0, "slo_tpot_s": 20.0}
    with Cluster(router=router, worker={"toy_step_s": 0.02, "max_context_tokens": 2048}) as one:
        yield one


def allocators(cluster: Cluster) -> dict[str, BlockAllocator]:
    hosts: dict[str, Any] = cluster._hosts
    return {name: hosts[name]._engine._program.blocks for name in cluster.worker_ids}


def seed_of(cluster: Cluster) -> bytes:
    hosts: dict[str, Any] = cluster._hosts
    return bytes(hosts["router"]._server._workers.model.hash_seed)


def blocks_of(cluster: Cluster, prompt: list[int], tenant: str, salt: str | None = None) -> dict[str, list[int]]:
    """The cached blocks of the prompt on each worker, found by the hashes that this tenant's requests have."""
    key = chain_key(cache_salt(ClusterSecret(cluster._secret), tenant, salt), seed_of(cluster))
    hashes = block_hashes(prompt, 16, key)
    return {
        name: [one._block_of[each] for each in hashes if each in one._block_of]
        for name, one in allocators(cluster).items()
    }


def cached_tokens(cluster: Cluster, token: str, prompt: list[int], **options: Any) -> int:
    with Client(cluster.address, token=token) as client:
        done = client.generate(prompt, max_tokens=3, temperature=0, **options)
    assert done.usage.prompt_tokens == len(prompt)
    return done.usage.cached_prompt_tokens


def test_equal_prompts_of_two_tenants_share_no_block(cluster: Cluster) -> None:
    tokens = {"acme": ACME, "beta": BETA, "": "operator"}
    first = {name: cached_tokens(cluster, token, PROMPT) for name, token in tokens.items()}
    assert first == {"acme": 0, "beta": 0, "": 0}, "the first request of each tenant finds nothing"
    held = {name: blocks_of(cluster, PROMPT, name) for name in tokens}
    for worker in cluster.worker_ids:
        blocks = [held[name][worker] for name in tokens]
        assert [len(one) for one in blocks] == [6, 6, 6], f"{worker} does not hold the prompt of each tenant"
        assert len({block for one in blocks for block in one}) == 18, f"a block of {worker} is shared"
        allocators(cluster)[worker].check()
    again = {name: cached_tokens(cluster, token, PROMPT) for name, token in tokens.items()}
    assert again == {"acme": 96, "beta": 96, "": 96}, "the second one finds the tenant's own blocks"


def test_the_salt_of_a_request_divides_a_tenants_cache(cluster: Cluster) -> None:
    prompt = [one + 1 for one in PROMPT]
    seen = [
        cached_tokens(cluster, token, prompt, cache_salt=salt)
        for token, salt in [(ACME, "x"), (ACME, "y"), (ACME, None), (BETA, "x"), ("operator", "x"), (ACME, "x")]
    ]
    assert seen == [0, 0, 0, 0, 0, 96]
    found = [blocks_of(cluster, prompt, "acme", salt)["decode-0"] for salt in ("x", "y", None)]
    assert len({block for one in found for block in one}) == 18


@pytest.mark.parametrize(("second", "most"), [(BETA, 1), (ACME, 2)], ids=["another tenant", "the same tenant"])
def test_running_requests_of_two_tenants_hold_different_blocks(cluster: Cluster, second: str, most: int) -> None:
    """The second case shows that the first one could fail."""
    prompt = [one + 1 + most for one in PROMPT]
    blocks = allocators(cluster)["decode-0"]
    options: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    with (
        Client(cluster.address, token=ACME) as one,
        Client(cluster.address, token=second) as other,
        one.stream(prompt, **options) as stream,
    ):
        begun = [next(stream), next(stream)]
        with other.stream(prompt, **options) as beside:
            begun += [next(beside), next(beside)]
            assert max(blocks._references) == most
    assert all(piece.token_ids for piece in begun)
