"""Searches by simulation: goodput, layouts, and bounds that no scheduler can exceed. Pure.

It gets the function that simulates as an argument, so that callers choose how runs are distributed. Read `goodput.py`
first, then `plan.py`.
"""
