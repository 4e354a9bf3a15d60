"""`pdserve bench`: puts load on running servers, and measures their answers.

The load comes from the traces and workloads of the simulator, the figures are those of `vllm bench serve`. Servers are
called by the SDK or by HTTP. It imports no simulated cluster. Read `benchmark.py` first, then `server.py`, which is the
interface to a server.
"""
