"""From a model folder to an engine: plan, load, assemble.

It imports every room but ranks. Nothing here runs once an engine is open, except the recorded steps in
`cpu_engine.py`. Read `open_rank` in `build_engine.py` first, which calls the others in this order: `device.py` and
`checkpoint.py` find facts, `load_plan.py` decides, `weights.py` loads, `cpu_engine.py` or `gpu_engine.py` assembles.
"""
