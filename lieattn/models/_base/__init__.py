"""What all families of networks share: symmetry, inputs, a field, a head, and modules around a network."""
