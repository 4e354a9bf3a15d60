"""The live view in a terminal: `pdserve top`."""
