"""Networks of edges on CPUs."""
