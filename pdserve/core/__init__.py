"""Pure centre shared by all rooms: standard library only, no clock, socket, thread or randomness."""
