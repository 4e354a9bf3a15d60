"""One router process: its gRPC servers and clients, tenants, tokenizers and child processes.

Turns calls and workers' messages into events for router/state, and executes the commands that come back. All I/O of
the router is here; it may import every other room of the router. Read `inference.py` first (a call from its arrival to
its last token), then `runtime.py`.
"""
