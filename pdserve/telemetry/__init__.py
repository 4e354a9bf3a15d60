"""Metrics, spans and logs of all processes.

`names.py` and `metric_names.py` are the tables of everything that is emitted; the exporters are imported only if they
are configured. It may import core, config and tls. Read `names.py` first, then `tracing.py`.
"""
