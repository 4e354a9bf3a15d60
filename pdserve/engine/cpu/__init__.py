"""What lies between the products, and what a CPU does in its own way: norms, gates, rounding, paged attention.

Each function uses a kernel of kernels/ if numba is there and the tensors suit it, and torch otherwise. It imports
memory (the pool) and its kernels, and nothing of the model. Read `ops.py` first.
"""
