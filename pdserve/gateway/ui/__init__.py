"""The live page: its sources, and how they become one HTML document."""
