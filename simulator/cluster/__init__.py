"""The simulated cluster: workers, network, routers and clock. Pure.

Time comes from an agenda and randomness from a seed; the decisions are those of the production code, which it imports
from the router, the workers and kvtransfer. Read `world.py` first.
"""
