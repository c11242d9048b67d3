"""Fused attention on CPUs."""
