"""What the authors of the papers chose and published, translated to the networks of the library."""

from lieattn.models.published._attentive import published_accuracy, published_attentive_cnn, published_inputs
from lieattn.models.published._gsa import published_table
from lieattn.models.published._lie import PublishedCoordinates, published_kernel, published_qm9, published_springs

__all__ = [
    "PublishedCoordinates",
    "published_accuracy",
    "published_attentive_cnn",
    "published_inputs",
    "published_kernel",
    "published_qm9",
    "published_springs",
    "published_table",
]
