"""Clusters of `up --detach`, whose launcher can be replaced while they serve.

A keeper is the parent of the cluster's processes (`keeper.py`). The launcher starts and watches them through it
(`link.py`), and gives it what a new launcher needs (`saved.py`). Import the modules; this package imports nothing.
"""
