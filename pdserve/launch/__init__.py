"""Starts a cluster and keeps it running, as processes of this host or as Ray actors.

Computes the processes and their settings, starts them in order, restarts those that end, and drains them. The
processes of `detached/` outlive their launcher. Only `ray_cluster.py` imports ray. Import the modules; this package
imports nothing. Read `spec.py` first (pure), then `serve.py`.
"""
