"""Transfers KV blocks from a prefill worker to a decode worker.

protocol/ decides; link/ serves the connections, transports/ moves the bytes, devices/ has the memory. reshape/ converts
blocks between pools of unequal shape, ranks/ joins the transfers of tensor-parallel ranks, and faults/ injects faults
for tests. Workers use `link/endpoint.py` and `protocol/transport.py`: read these first. It imports the engine, but no
worker and no router.
"""
