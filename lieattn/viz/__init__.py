"""Pictures of networks.

Every picture is a ``matplotlib.figure.Figure`` on an Agg canvas. pyplot is not used, so pictures can be made without
a display and in threads. If matplotlib is not installed, the functions raise ImportError. Angles are in radians in the
arguments and in degrees in the pictures.
"""

from lieattn.viz._charts import accuracy_by_angle, comparison, error_curves, training_curves
from lieattn.viz._draw import save
from lieattn.viz._figures import (
    attention_picture,
    attention_under_group,
    steerability,
)
from lieattn.viz._microscope import Microscope
from lieattn.viz._observation import Turn
from lieattn.viz._runs import run_pictures

__all__ = [
    "Microscope",
    "Turn",
    "accuracy_by_angle",
    "attention_picture",
    "attention_under_group",
    "comparison",
    "error_curves",
    "run_pictures",
    "save",
    "steerability",
    "training_curves",
]
