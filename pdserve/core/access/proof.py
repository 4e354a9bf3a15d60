"""Proves to the other side of a call or connection that a process knows the cluster's secret, without sending it. Pure.

    caller                                              worker
    GetChallenge(target, nonce)               ------->  is `target` the address that I advertise?
                                              <-------  challenge, greeting mac
    the call, with a mac over all of these    ------->  known challenge? nonce not seen yet? mac right?
                                              <-------  answer mac
    first message

Every proof contains the address that the caller dialled, so a false worker cannot pass it on to a real one. Each
process has a random challenge, so a proof cannot be replayed to a later process on the same address. No clock is
needed. Callers of this module supply the random bytes. Reasons: docs/decisions/0007-cluster-secret.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

from pdserve.core.errors import ConfigError, Unauthenticated

MIN_SECRET_CHARS: Final = 16
MAX_SECRET_CHARS: Final = 4096
NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
MAX_SEEN_NONCES: Final = 65_536  # nonces of proven calls; foreign processes cannot add to them

# leader: the leader of a worker's tensor-parallel ranks. rank: a rank that joins from another host.
Role = Literal["router", "worker", "leader", "rank", "launcher"]


@final
class ClusterSecret:
    """Raises ConfigError on a text that is too short to be a secret."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        if not MIN_SECRET_CHARS <= len(text) <= MAX_SECRET_CHARS:
            raise ConfigError(
                "cluster_secret",
                f"{len(text)} characters" if text else "nothing",
                f"{MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} characters; set PDSERVE_CLUSTER_SECRET, or the name of a "
                "file in PDSERVE_CLUSTER_SECRET_FILE, to the same secret for every router and worker",
            )
        self._key = text.encode()

    def mac(self, purpose: str, *parts: str | bytes) -> bytes:
        """The MAC of `parts`, MAC_BYTES long. Two different lists of parts never have the same MAC input."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in ("pdserve.v1", purpose, *parts):
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def matches(self, mac: bytes, purpose: str, *parts: str | bytes) -> bool:
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    def __repr__(self) -> str:
        return "ClusterSecret()"


def canonical_address(address: str) -> str:
    """HOST:PORT in the form that proofs contain and callers must dial.

    localhost can mean two addresses with different listeners, so it is replaced by the IPv4 address.
    """
    host, colon, port = address.lower().rpartition(":")
    return f"127.0.0.1{colon}{port}" if host == "localhost" else f"{host}{colon}{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProof:
    """The metadata that a caller sends with its call."""

    role: str
    caller: str
    target: str
    challenge: bytes
    nonce: bytes
    mac: bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity with which a process calls workers."""

    secret: ClusterSecret
    role: Role
    name: str

    @classmethod
    def of(cls, secret: ClusterSecret, role: Role, id_: str, incarnation: str) -> Identity:
        return cls(secret, role, caller_name(id_, incarnation))


def caller_name(id_: str, incarnation: str) -> str:
    return f"{id_}/{incarnation}"


@final
class Introduction:
    """The caller's side of one call."""

    def __init__(self, identity: Identity, method: str, target: str, nonce: bytes) -> None:
        """`method` is gRPC's name of the method, `target` a canonical address, `nonce` NONCE_BYTES random bytes."""
        assert len(nonce) == NONCE_BYTES
        self.target, self.nonce = target, nonce
        self._identity, self._method = identity, method
        self._challenge = b""

    def greeted(self, challenge: bytes, mac: bytes) -> CallProof:
        """Checks the answer to GetChallenge. Raises Unauthenticated unless the callee proves that it belongs to the
        cluster."""
        me, secret = self._identity, self._identity.secret
        if not secret.matches(mac, "greeting", self.target, challenge, self.nonce):
            raise Unauthenticated(_not_proven(self.target))
        self._challenge = challenge
        call = (self._method, me.role, me.name, self.target, challenge, self.nonce)
        return CallProof(
            role=me.role,
            caller=me.name,
            target=self.target,
            challenge=challenge,
            nonce=self.nonce,
            mac=secret.mac("call", *call),
        )

    def answered(self, mac: bytes) -> None:
        """Checks the call's initial metadata. Raises Unauthenticated unless it answers this call."""
        if not self._identity.secret.matches(
            mac, "answer", self._method, self._identity.name, self.target, self._challenge, self.nonce
        ):
            raise Unauthenticated(_not_proven(self.target))


@final
class CallChecker:
    """The worker's side. Used on one event loop. `fresh` returns NONCE_BYTES random bytes."""

    def __init__(
        self, secret: ClusterSecret, target: str, fresh: Callable[[], bytes], max_nonces: int = MAX_SEEN_NONCES
    ) -> None:
        """`target` is the address that the worker advertises."""
        self._secret, self._fresh, self._max_nonces = secret, fresh, max_nonces
        self._target = canonical_address(target)
        self._challenge = fresh()
        self._seen: set[bytes] = set()

    def greet(self, target: str, nonce: bytes) -> tuple[bytes, bytes]:
        """The answer to GetChallenge: challenge and mac. Raises Unauthenticated."""
        self._check_target(target)
        if len(nonce) != NONCE_BYTES:
            raise Unauthenticated(f"nonce: got {len(nonce)} bytes, expected {NONCE_BYTES}")
        return self._challenge, self._secret.mac("greeting", self._target, self._challenge, nonce)

    def check(self, method: str, role: Role, proof: CallProof | None) -> bytes:
        """The MAC that answers the call. Raises Unauthenticated unless the caller is a `role` of the cluster, and the
        proof is for this call."""
        if proof is None:
            raise Unauthenticated(
                "the call has no proof of the cluster's secret; only the cluster's own processes may call this method"
            )
        call = (method, proof.role, proof.caller, proof.target, proof.challenge, proof.nonce)
        if len(proof.nonce) != NONCE_BYTES or not self._secret.matches(proof.mac, "call", *call):
            raise Unauthenticated(
                "the proof of the cluster's secret is wrong; set the same PDSERVE_CLUSTER_SECRET everywhere"
            )
        self._check_target(proof.target)
        if proof.role != role:
            raise Unauthenticated(f"the caller is a {proof.role}; only a {role} may call {method}")
        if proof.challenge != self._challenge or proof.nonce in self._seen:
            raise Unauthenticated("the proof of the cluster's secret is old; get a new challenge")
        self._remember(proof.nonce)
        return self._secret.mac("answer", method, proof.caller, self._target, proof.challenge, proof.nonce)

    def _check_target(self, target: str) -> None:
        if target != self._target:
            raise Unauthenticated(
                f"the caller dialled {target[:128]!r}, but this worker's address is {self._target!r}; dial that, or "
                "start it with --advertise"
            )

    def _remember(self, nonce: bytes) -> None:
        self._seen.add(nonce)
        if len(self._seen) >= self._max_nonces:  # a new challenge invalidates all old proofs
            self._challenge = self._fresh()
            self._seen.clear()


def _not_proven(target: str) -> str:
    return (
        f"{target} did not prove that it knows the cluster's secret; it belongs to another cluster, or has another "
        "PDSERVE_CLUSTER_SECRET"
    )
