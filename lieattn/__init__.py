"""Group-equivariant transformers for point clouds and homogeneous spaces.

Import what is used from the subpackages, lowest first: ``groups``, ``geometry``, ``ops``, ``nn``, ``models``. The
tools around a model (``train``, ``certify``, ``viz``, ``bench``) bring heavier packages and are imported apart.
"""

from lieattn import geometry, groups, models, nn, ops, testing

__all__ = ["geometry", "groups", "models", "nn", "ops", "testing"]
