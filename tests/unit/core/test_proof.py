"""Which callers are accepted as processes of the cluster, by the proofs alone."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from dataclasses import replace

import pytest

from pdserve.core.access.proof import (
    MAC_BYTES,
    NONCE_BYTES,
    CallChecker,
    CallProof,
    ClusterSecret,
    Identity,
    Introduction,
    canonical_address,
)
from pdserve.core.errors import ConfigError, Unauthenticated

SECRET = ClusterSecret("a secret of sixteen")
OTHER = ClusterSecret("another one of those")
METHOD = "/pdserve.v1.WorkerService/Attach"
HERE = "127.0.0.1:7001"
_numbers = itertools.count()


def fresh() -> bytes:
    return next(_numbers).to_bytes(NONCE_BYTES, "big")


def checker(secret: ClusterSecret = SECRET, target: str = HERE, max_nonces: int = 8) -> CallChecker:
    return CallChecker(secret, target, fresh, max_nonces)


def calling(secret: ClusterSecret = SECRET, target: str = HERE) -> Introduction:
    return Introduction(Identity.of(secret, "router", "router-0", "1"), METHOD, target, fresh())


def proof_for(worker: CallChecker, call: Introduction) -> CallProof:
    return call.greeted(*worker.greet(call.target, call.nonce))


def test_both_sides_prove_themselves() -> None:
    worker, call = checker(), calling()
    proof = proof_for(worker, call)
    call.answered(worker.check(METHOD, "router", proof))
    assert proof.caller == "router-0/1"


def test_the_secret_is_in_no_message() -> None:
    worker, call = checker(), calling()
    challenge, mac = worker.greet(call.target, call.nonce)
    proof = call.greeted(challenge, mac)
    said = b"".join((challenge, mac, proof.mac, proof.nonce, worker.check(METHOD, "router", proof)))
    assert b"a secret" not in said
    assert "a secret" not in repr(SECRET) + repr(proof) + repr(Identity.of(SECRET, "router", "r", "1"))


def test_a_worker_of_another_secret_gets_no_proof() -> None:
    call = calling()
    with pytest.raises(Unauthenticated, match="did not prove that it knows"):
        proof_for(checker(OTHER), call)


def test_a_caller_of_another_secret_is_rejected() -> None:
    worker, call = checker(), calling()
    challenge, _ = worker.greet(call.target, call.nonce)
    forged = calling(OTHER)
    greeting = OTHER.mac("greeting", HERE, challenge, forged.nonce)
    with pytest.raises(Unauthenticated, match="same PDSERVE_CLUSTER_SECRET"):
        worker.check(METHOD, "router", forged.greeted(challenge, greeting))


def test_a_call_without_a_proof_is_rejected() -> None:
    with pytest.raises(Unauthenticated, match="no proof"):
        checker().check(METHOD, "router", None)


def test_a_replayed_proof_is_rejected() -> None:
    worker, call = checker(), calling()
    proof = proof_for(worker, call)
    worker.check(METHOD, "router", proof)
    with pytest.raises(Unauthenticated, match="secret is old"):
        worker.check(METHOD, "router", proof)


def test_a_proof_is_invalid_for_a_restarted_worker() -> None:
    proof = proof_for(checker(), calling())
    with pytest.raises(Unauthenticated, match="secret is old"):
        checker().check(METHOD, "router", proof)


def test_a_false_worker_cannot_relay_to_a_real_one() -> None:
    """The false worker has the router's messages for its own address, and sends them to the real worker."""
    worker, call = checker(), calling(target="127.0.0.2:7001")
    with pytest.raises(Unauthenticated, match=r"dialled '127.0.0.2:7001', but .*127.0.0.1:7001"):
        worker.greet(call.target, call.nonce)
    challenge, mac = worker.greet(HERE, call.nonce)
    with pytest.raises(Unauthenticated):  # The real worker's greeting is for its own address.
        call.greeted(challenge, mac)
    # Even if it passed the greeting.
    proof = call.greeted(challenge, SECRET.mac("greeting", call.target, challenge, call.nonce))
    with pytest.raises(Unauthenticated, match="caller dialled"):
        worker.check(METHOD, "router", proof)


def test_reflected_proofs_are_rejected() -> None:
    """A greeting or an answer, reflected as a proof."""
    worker, call = checker(), calling()
    challenge, mac = worker.greet(call.target, call.nonce)
    proof = call.greeted(challenge, mac)
    answer = worker.check(METHOD, "router", proof)
    for reflected in (mac, answer):
        with pytest.raises(Unauthenticated, match="is wrong"):
            checker().check(METHOD, "router", replace(proof, nonce=fresh(), mac=reflected))


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "worker"},
        {"caller": "router-1/1"},
        {"target": "127.0.0.1:7002"},
        {"challenge": b"c" * NONCE_BYTES},
        {"nonce": b"n" * NONCE_BYTES},
        {"nonce": b""},
        {"mac": bytes(MAC_BYTES)},
        {"mac": b""},
    ],
)
def test_an_altered_proof_is_rejected(changes: dict[str, str | bytes]) -> None:
    worker = checker()
    proof = proof_for(worker, calling())
    with pytest.raises(Unauthenticated, match="is wrong"):
        worker.check(METHOD, "router", replace(proof, **changes))  # type: ignore[arg-type]
    worker.check(METHOD, "router", proof)  # And the real caller is not affected.


def test_a_proof_is_for_one_method_and_one_role() -> None:
    worker = checker()
    proof = proof_for(worker, calling())
    with pytest.raises(Unauthenticated, match="is wrong"):
        worker.check("/pdserve.v1.TransferService/Open", "worker", proof)
    with pytest.raises(Unauthenticated, match="caller is a router; only a worker may call"):
        worker.check(METHOD, "worker", proof)


@pytest.mark.parametrize("mac", [b"", bytes(MAC_BYTES)])
def test_a_call_that_is_not_answered_is_not_trusted(mac: bytes) -> None:
    worker, call = checker(), calling()
    proof_for(worker, call)
    with pytest.raises(Unauthenticated):
        call.answered(mac)


def test_an_answer_is_for_one_call() -> None:
    worker, first, second = checker(), calling(), calling()
    answer = worker.check(METHOD, "router", proof_for(worker, first))
    worker.check(METHOD, "router", proof_for(worker, second))
    with pytest.raises(Unauthenticated):
        second.answered(answer)


def test_seen_nonces_are_bounded_without_allowing_replays() -> None:
    worker = checker(max_nonces=3)
    proofs = []
    for _ in range(10):
        proofs.append(proof_for(worker, calling()))
        worker.check(METHOD, "router", proofs[-1])
        assert len(worker._seen) < 3
    for proof in proofs:
        with pytest.raises(Unauthenticated, match="secret is old"):
            worker.check(METHOD, "router", proof)


def test_a_rejected_proof_takes_no_memory() -> None:
    worker = checker()
    proof = proof_for(worker, calling())
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            worker.check(METHOD, "router", replace(proof, nonce=fresh()))
    assert worker._seen == set()


@pytest.mark.parametrize("nonce", [b"", b"short", b"x" * 17])
def test_a_nonce_has_one_size(nonce: bytes) -> None:
    with pytest.raises(Unauthenticated, match=f"got {len(nonce)} bytes, expected 16"):
        checker().greet(HERE, nonce)


def test_parts_of_a_mac_cannot_be_shifted() -> None:
    assert SECRET.mac("call", "ab", "c") != SECRET.mac("call", "a", "bc")
    assert SECRET.mac("call", "ab") != SECRET.mac("call", "ab", "")
    assert SECRET.mac("call", "ab") == SECRET.mac("call", b"ab")


@pytest.mark.parametrize("text", ["", "fifteen letters", "x" * 4097])
def test_an_invalid_secret_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="16 to 4096 characters; set PDSERVE_CLUSTER_SECRET") as caught:
        ClusterSecret(text)
    assert caught.value.field == "cluster_secret"
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "canonical"),
    [
        ("localhost:7001", "127.0.0.1:7001"),
        ("LocalHost:7001", "127.0.0.1:7001"),
        ("10.0.0.7:1", "10.0.0.7:1"),
        ("D0.Example:1", "d0.example:1"),
        ("[::1]:7001", "[::1]:7001"),
        ("", ""),
    ],
)
def test_an_address_has_one_spelling(address: str, canonical: str) -> None:
    assert canonical_address(address) == canonical


def test_a_mac_is_over_each_part_with_its_length() -> None:
    """Other processes compute the same MAC, so a change of it changes the wire protocol."""
    text = "a secret of some length"
    parts = (b"pdserve.v1", b"purpose", b"text", b"\x00\x01")
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    expected = hmac.new(text.encode(), data, hashlib.sha256).digest()
    assert ClusterSecret(text).mac("purpose", "text", b"\x00\x01") == expected


def test_a_long_target_is_cut_in_the_message() -> None:
    target = "x" * 1000
    worker = checker()
    with pytest.raises(Unauthenticated) as raised:
        worker._check_target(target)
    assert f"{'x' * 128!r}," in str(raised.value)
