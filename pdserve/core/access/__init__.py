"""Who may call, and how much at once: keys, proofs of the cluster's secret, addresses, shares. Pure.

Gateway, router and workers check by the same rules. Read `proof.py` first.
"""
