"""Tensor parallelism: one engine on several processes, of this host or of others.

The leader starts followers, gives the orders of each step and samples; followers compute. How tensors travel within a
step is model/collectives.py, and what part a rank holds model/parameters.py. It may import all of the engine but
`load_engine.py`. Read `leader.py` first.
"""
