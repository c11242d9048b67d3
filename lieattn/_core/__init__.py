"""What every package shares."""
