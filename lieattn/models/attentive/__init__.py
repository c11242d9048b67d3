"""Attentive group convolutional networks."""
