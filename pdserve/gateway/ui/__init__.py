"""The live page: its sources, and the code that joins them into one HTML document.

It decides nothing: frames come from the router. Read `page.py` first (how the document is made), then `main.js`.
"""
