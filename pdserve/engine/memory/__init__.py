"""Memory of KV blocks and its size.

`plan.py` decides, from sizes in bytes, how many blocks and rows a worker has; `host.py` asks the host and makes memory
that processes share; `pool.py` lays blocks out in it. It imports no other room of the engine. Only `pool.py` imports
torch. Read `plan.py` first.
"""
