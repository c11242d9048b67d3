"""Fast twins of the operator: the same signature, tested equal to the plain evaluation."""
