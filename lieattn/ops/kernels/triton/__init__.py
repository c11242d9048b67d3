"""Fused attention in Triton, for CUDA."""
