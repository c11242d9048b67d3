"""GSA-Nets: group equivariant stand-alone self-attention."""
