"""Faults on purpose, for tests of whole clusters: a seeded plan, and the proxy that carries it out.

A worker uses this room only if its settings ask for faults. Read `plan.py` first.
"""
