"""Measure how equivariant a network is: element by element, in every precision, as a table."""

from lieattn.certify._certificate import Certificate, Diagnosis, Row
from lieattn.certify._measure import TOLERANCES, certify
from lieattn.certify._moves import Kind, moved

__all__ = ["TOLERANCES", "Certificate", "Diagnosis", "Kind", "Row", "certify", "moved"]
