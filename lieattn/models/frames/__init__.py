"""Networks on the frames of a finite group."""
