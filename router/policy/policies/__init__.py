"""The placement policies, one a file. Pure.

A policy is added with one file here, whose name is the policy's (`round_robin.py` is `round-robin`), and which declares
POLICY, a PolicyEntry. Settings, commands and docs read the names of the files. Files may import router/policy,
router/state and pdserve.core, and not each other. Read `least_loaded.py` first.
"""
