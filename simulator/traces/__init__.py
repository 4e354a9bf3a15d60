"""The requests of a simulation: trace files, recordings and synthetic workloads, and their transformations.

Pure, apart from opening the file. It imports the router's recording and state, to read recordings. Read `files.py`
first, which recognises a file's format.
"""
