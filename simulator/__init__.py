"""Simulates a cluster, searches by simulation, and measures running servers.

`cluster` runs the router's and the workers' own decision code with discrete events; `traces` has the requests, `search`
finds rates and layouts, `report` shows results. These are pure, apart from opening files. `bench` and `commands` do
I/O. It may import every other package, but not torch. Read `model.py` first, then `cluster/world.py`.
"""
