"""The registry of workers and the prefix index: which worker has cached which blocks.

Both are in Redis, with leases; a router without Redis has its index in memory. It imports core and redis, and decides
nothing about requests. Read `schema.py` first, then `redis_index.py` and `publisher.py`.
"""
