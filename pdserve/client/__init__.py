"""The SDK: a blocking and an asyncio client of a router, over gRPC.

It imports core, wire, tls and telemetry, and never torch, numpy, ray, redis or opentelemetry, so that it is light. Read
`options.py`, `request.py` and `base.py` first (the messages of a call), then `sync.py` or `aio.py`, which wait.
"""
