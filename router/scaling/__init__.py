"""How many workers a cluster needs, and of which role: decided every few seconds by predicted goodput. Pure.

`Controller.decide(observed, now_s) -> Decision` changes nothing itself: a launcher or the simulator carries the change
out. Read `interface.py` first. docs/controller.md describes the rules.
"""
