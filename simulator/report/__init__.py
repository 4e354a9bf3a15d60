"""Results of simulations for people: tables, charts and pages. Pure.

It may import `search` for the types of its results, and pdserve.plot for charts. Read `comparison.py` first, which has
the results as plain data.
"""
