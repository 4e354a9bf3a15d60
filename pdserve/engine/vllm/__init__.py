"""vLLM's model runner as an engine: any model that vLLM serves, on its kernels.

A worker opens it with `worker.engine=vllm`, in an environment of its own (`make vllm-env`). Nothing else imports it,
and only it imports vllm. `start.py` opens vLLM's worker, `pool.py` gives it our memory, `requests.py` turns rows into
vLLM's requests, and `engine.py` runs a step.
"""
