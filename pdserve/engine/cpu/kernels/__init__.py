"""CPU kernels, compiled by numba at the first start. Each replaces several passes of torch over memory by one.

A row's bits do not depend on other rows, on threads or on chunks. Files are inlined in each other, so machine code is
kept under a digest of all of them (`jit.py`). Of pdserve they import each other and core.errors only. Read `task.py`
first (how a kernel is called), then `rows.py`, the simplest kernels.
"""
