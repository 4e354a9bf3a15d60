"""`pdserve bench`: puts load on running servers, and measures their answers.

The load comes from the traces and workloads of the simulator, the figures are those of `vllm bench serve`. Servers are
called by the SDK or by HTTP. It imports no simulated cluster. Read `session.py` first, then `server.py`, the interface
to a server.
"""
