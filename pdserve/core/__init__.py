"""Types and rules that all packages share. Pure: standard library only, no clock, socket, thread or randomness.

It imports nothing else of the repository. access/ has keys and addresses, kv/ the blocks, cost/ the cost models and the
rules that follow from them. Read `types.py` first, then `protocol.py`, the messages between workers and routers.
"""
