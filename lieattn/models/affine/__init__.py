"""Networks with affine self convolution."""
