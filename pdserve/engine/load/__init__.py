"""From a model folder to an engine: checks the settings and the memory, loads weights, assembles.

It imports every room but ranks. Nothing here runs once an engine is open, except `recorded.py`. Read `build_engine.py`
first, then `weights.py`.
"""
