"""One end of a transfer in a process of its own, for tests that kill it. Prints one line per step on stdout.

python -m tests.unit.kvtransfer.peer sender TRANSPORT ENDPOINT BLOCKS
    starts transfer "killed" and pushes all blocks but the last
python -m tests.unit.kvtransfer.peer receiver TRANSPORT BLOCKS
    prints its gRPC port, expects transfer "killed"
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from kvtransfer.link.endpoint import make_receiver, make_sender
from pdserve.core.kv.kv_shape import Grant, TransferKey
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import PATIENT, GrpcHost, HostPool, fingerprint


def grant(endpoint: str, num_blocks: int) -> Grant:
    return Grant(
        key=TransferKey(transfer_id="killed", attempt=1, generation=1),
        endpoint=endpoint,
        worker_id="d0",
        incarnation="d0-1",
        fingerprint=fingerprint(),
        blocks=tuple(range(num_blocks)),
        num_cached_blocks=0,
    )


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(argv: list[str]) -> None:
    role, transport, *rest = argv
    if role == "sender":
        endpoint, num_blocks = rest[0], int(rest[1])
        sender = make_sender(
            endpoint_config(
                HostPool(num_blocks, seed=7),
                fingerprint(),
                worker_id="p9",
                incarnation="p9-1",
                transport=transport,
                lease=PATIENT,
            )
        )
        target = grant(endpoint, num_blocks)
        sender.start(target, lambda sent: say(sent=sent.outcome.value, error=sent.error))
        sender.push(target.key, [(i, i) for i in range(num_blocks - 1)], False)
    else:
        num_blocks = int(rest[0])
        receiver = make_receiver(
            endpoint_config(
                HostPool(num_blocks),
                fingerprint(),
                worker_id="d0",
                incarnation="d0-1",
                transport=transport,
                lease=PATIENT,
            ),
            host="127.0.0.1",
        )
        receiver.expect(grant("", num_blocks), lambda received: say(received=received.outcome.value))
        host = GrpcHost(receiver.servicer)
        say(port=host.port)
    say(ready=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
