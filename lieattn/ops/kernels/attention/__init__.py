"""Fused attention with the patterns ``"joint"``, ``"framewise"`` and ``"query_sum"``, on CPUs."""
