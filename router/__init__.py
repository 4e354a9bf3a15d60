"""The router: accepts requests, decides where and when each runs, and follows it to its end.

`state` and `policy` decide and are pure; `service` does the I/O, and `recording` writes down what happened. It imports
neither the workers' packages nor kvtransfer, and never torch. Read `state/state.py` first.
"""
