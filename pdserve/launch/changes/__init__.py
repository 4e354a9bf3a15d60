"""Changes of the workers of a running cluster, by operators and by the controller.

`plans.py` decides (pure), `cluster.py` carries out, `server.py` takes the calls of operators, and `autoscale.py` runs
the controller of router/scaling. Import the modules; this package imports nothing.
"""
