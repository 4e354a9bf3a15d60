"""Tool calls: the plan that follows from a request, and readers that find calls in the text of an answer. Pure.

A reader receives the text in pieces, and finds the same calls wherever the text is split. Read `plan.py` first, then
`reading.py`, which has the events and the interface of a reader.
"""
