"""Loops over plain memory, compiled by numba at the first start: what stock torch does in many passes on a CPU."""
