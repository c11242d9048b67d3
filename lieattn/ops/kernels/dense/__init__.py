"""Attention over whole clouds with few channels, on CPUs."""
