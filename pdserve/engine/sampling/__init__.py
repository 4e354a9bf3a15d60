"""From logits to tokens: grammars, bans, penalties, filters, noise.

What a row samples depends on its own text, sampling and logits only, never on the batch, the worker or the time. It
imports `interface.py`, cpu/ops.py and pdserve.structured. gpu/ samples by the same rules. Read `sampler.py` first.
"""
