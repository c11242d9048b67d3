"""A small network for every head, on CPUs."""
