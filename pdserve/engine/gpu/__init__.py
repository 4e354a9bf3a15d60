"""The engine on a CUDA device: decode steps as CUDA graphs, prompts by the eager engine with kernels of our own.

This room knows rows and sequences, and prepares on the host what kernels/ computes on the device. The CPU path imports
none of it, but for kernels/switches.py. It imports `torch_engine.py` and the rooms below, not load or ranks. Read
`engine.py` first, then `graphs.py`.
"""
