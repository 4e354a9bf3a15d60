"""Simulates a cluster: discrete events around the router's and the workers' own decision code. Pure."""
