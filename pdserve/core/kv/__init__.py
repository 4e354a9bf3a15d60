"""KV blocks: their identity, their allocation, and the format of their bytes. Pure.

Both workers, the transfer and the prefix index share it. Read `cache.py` first.
"""
