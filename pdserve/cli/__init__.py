"""The command `pdserve`: one module per sub-command, which parses flags, calls other packages and prints.

The module of a sub-command has `HELP`, `add_flags` and `run`, and imports what it needs when it runs. The commands for
recordings and for simulations are in router/recording and simulator/commands. Read `main.py` first, then `generate.py`.
"""
