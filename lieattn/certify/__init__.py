"""Certificates: measured errors of the equivariance of a network."""

from lieattn.certify._certificate import Certificate, Diagnosis, Row
from lieattn.certify._elements import where_outside
from lieattn.certify._measure import TOLERANCES, certify
from lieattn.certify._moves import Kind, moved

__all__ = ["TOLERANCES", "Certificate", "Diagnosis", "Kind", "Row", "certify", "moved", "where_outside"]
