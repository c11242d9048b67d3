"""LieTransformer, LieConv and the finite SE(2) variant: networks on coordinates of relative elements."""
