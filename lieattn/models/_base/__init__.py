"""What all families of networks share."""
