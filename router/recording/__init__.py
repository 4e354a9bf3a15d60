"""Recordings of a router: writes them, replays them and compares the commands, or plays them in the live view.

A recording holds every event and command of router/state, so that a decision can be reproduced and judged later. It
imports router/state; only `play` needs the gateway's page and the terminal view. Read `replay.py` first, which has the
format.
"""
