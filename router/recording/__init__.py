"""Recordings of a router: writes them, replays them and compares the commands, or plays them in the live view.

A recording holds every event and command of router/state, so that a decision can be reproduced and judged later. Read
`replay.py` first, which has the format.
"""
