"""Faults on purpose, for tests of whole clusters: a seeded plan, and a transport around a real one.

A worker uses this room only if its settings ask for faults. Read `plan.py` first.
"""
