"""Types and rules that all packages share. Pure: standard library only, no clock, socket, thread or randomness."""
