"""Row 3: a stranger in the embedded Redis, who would register a worker of its own and attract the router.

Reads the server's port from the launcher's lines, and asks without a password and with wrong ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from benchmarks.attacks.row import Finding, Row, Target

PASSWORDS: Final = (None, "", "redis", "pdserve", "secret", "0" * 64)
FORGED: Final = (
    ("SADD", "{pd:default}:workers", "d9"),
    ("HSET", "{pd:default}:worker:d9", "incarnation", "1", "facts", '{"role":"decode","endpoint":"127.0.0.1:1"}'),
    ("KEYS", "*"),
    ("CONFIG", "GET", "requirepass"),
)


def attack(target: Target) -> Finding:
    host, _, port = target.address("redis").rpartition(":")
    errors: Counter[str] = Counter()
    complaints = []
    for password in PASSWORDS:
        for command in FORGED:
            with Redis(host=host, port=int(port), password=password, socket_timeout=5.0) as stranger:
                try:
                    stranger.execute_command(*command)
                    errors["OK"] += 1
                    complaints.append(f"{command[0]} was answered to a stranger with the password {password!r}")
                except AuthenticationError as error:
                    errors[type(error).__name__] += 1
                except RedisError as error:
                    errors[type(error).__name__] += 1
                    complaints.append(f"{command[0]} ended in {error}")
    return Finding(
        attempts=errors.total(),
        rejected=errors["AuthenticationError"],
        errors=errors,
        complaints=tuple(complaints),
    )


ROW = Row(number=3, name="a stranger in the embedded Redis", attack=attack)
