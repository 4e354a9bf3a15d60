"""A prefill worker: computes prompts, samples their first token, and pushes their KV to the decode worker.

The decisions are pure (`scheduler.py` and what it imports: they know pdserve.core and the engine's interface);
`program.py` carries them out with an engine and a KV sender, and imports pdserve.worker and kvtransfer. Read
`prefill_sequence.py` first, whose table has the stages of a prompt, then `scheduler.py`.
"""
