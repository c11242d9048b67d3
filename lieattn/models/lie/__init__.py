"""LieTransformer, LieConv, and the finite SE(2) variant: networks of coordinates of relative elements."""
