"""The errors of training that the command line reports in a line, not with a traceback."""


class UsageError(ValueError):
    """Settings that cannot work together, or lack something."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, or does not belong to the network."""


class NonFiniteError(FloatingPointError):
    """Training met a loss or weights that are NaN or infinite."""
