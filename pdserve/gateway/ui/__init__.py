"""The live page: its sources, and the code that joins them into one HTML document."""
