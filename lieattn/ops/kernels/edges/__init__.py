"""Networks of edges and messages along edges, on CPUs."""
