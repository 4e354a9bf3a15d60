"""Charts and pages of all commands, as SVG and HTML text. Pure.

It imports nothing of the other packages, and nothing that does I/O. Read `drawing.py` first, then `charts.py`.
"""
