"""Networks on lifts to Lie groups."""
