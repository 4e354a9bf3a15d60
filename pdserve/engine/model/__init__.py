"""The decoder, and what config.json says of it.

Decides which parameters a model has, how each is stored and multiplied, and in which order a step computes. It reads
config.json and calls its ranks' collectives; there is no other I/O. It imports cpu and memory. Read `decoder.py`
first, then `linear.py` (products), `forms.py` (how weights are stored), `config.py` and `parameters.py`.
"""
