"""A decode worker: continues sequences token by token, in steps whose rows meet their TPOT targets.

The decisions are pure (`scheduler.py` and all that it imports: they know pdserve.core and the engine's interface);
`program.py` carries them out with an engine and a KV receiver, and imports pdserve.worker and kvtransfer. It launches
steps early if the engine allows it (`steps_in_flight.py`). Read `decode_sequence.py` first, whose table has the stages
of an attempt, then `scheduler.py` and `planning.py`.
"""
