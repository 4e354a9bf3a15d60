"""Searches by simulation: goodput, layouts, and bounds that no scheduler can exceed. Pure.

Read `goodput.py` first.
"""
