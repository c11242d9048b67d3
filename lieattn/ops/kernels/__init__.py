"""Fast kernels of the operator, which are tested to give the same results as the plain evaluation."""
