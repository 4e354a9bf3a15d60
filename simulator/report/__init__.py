"""Results of simulations for people: tables, charts and pages. Pure.

Read `comparison.py` first, which has the results as plain data.
"""
