"""Tool calls: what a request asks for, and readers that find calls in the text of an answer. Pure.

A reader is fed the text in any pieces, and gives the same calls wherever it is split.
"""
