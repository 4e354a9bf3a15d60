"""The transformer that prefill and decode workers share: rows of a step in, tokens out.

The worker knows `interface.py` only, and `load_engine.py`, which opens an engine: ours, or one of another package.
`load_engine` imports ranks and vllm, they import load, then gpu, `torch_engine.py`, sampling, model, cpu, memory: each
room imports those after it. Read `interface.py` first, then `torch_engine.py`, which computes a step.
"""
