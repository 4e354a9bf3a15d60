"""A worker of either role: the process around an engine and a role's scheduler.

One thread owns the engine and the program; gRPC has its own; they exchange messages through queues. It imports the
engine's interface, telemetry, prefix, wire and core, never a role's package, kvtransfer or torch. Read `program.py`
first (what happens with a message and in a step), then `host.py` (threads, streams and the end of the process).
"""
