"""What a cluster would do: discrete events over the router's and the workers' own decision code. Pure."""
