"""Attentive group convolution on grids, on CPUs."""
