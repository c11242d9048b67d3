"""What every package shares: checks of arguments, numerics, and support of torch."""
