"""What a step and a transfer cost in seconds, and the rules that follow from it. Pure.

Workers and router decide by the same models. Read `latency.py` first.
"""
