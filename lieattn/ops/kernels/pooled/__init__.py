"""Fused attention with the pattern ``"pooled"``, on CPUs."""
