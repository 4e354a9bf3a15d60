"""Proofs on a data connection: both parties know the ticket and the cluster's secret. Pure.

A third party that has read a ticket is not admitted, because the greeting must also prove the secret. Each connection
has a new ticket, so a proof cannot be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.frames import Greeting
from pdserve.core.access.proof import ClusterSecret


@dataclass(frozen=True, slots=True)
class Parties:
    """The two workers of a connection, and its transport."""

    sender: str  # proof.caller_name
    receiver_incarnation: str
    transport: int


def sender_greeting(secret: ClusterSecret, parties: Parties, ticket: bytes, nonce: bytes) -> Greeting:
    return Greeting(ticket, nonce, secret.mac("kv sender", *_parts(parties, ticket, nonce)))


def is_proven(secret: ClusterSecret, parties: Parties, greeting: Greeting) -> bool:
    return secret.matches(greeting.mac, "kv sender", *_parts(parties, greeting.ticket, greeting.nonce))


def receiver_answer(secret: ClusterSecret, parties: Parties, greeting: Greeting) -> bytes:
    """ANSWER_BYTES bytes, which only the receiver of this connection can make."""
    return secret.mac("kv receiver", *_parts(parties, greeting.ticket, greeting.nonce))


def _parts(parties: Parties, ticket: bytes, nonce: bytes) -> tuple[str | bytes, ...]:
    return parties.sender, parties.receiver_incarnation, str(int(parties.transport)), ticket, nonce
