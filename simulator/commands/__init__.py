"""The commands `pdserve simulate`, `pdserve plan` and `pdserve bench`.

`simulate.py`, `plan.py` and `bench.py` define the flags, and import little else; the other modules run the commands
and may import every room of the simulator. Read `simulate.py` first, then `simulation.py`.
"""
