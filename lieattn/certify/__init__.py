"""Certificates: measured errors of the equivariance of a network."""

from lieattn.certify._certificate import Certificate, Diagnosis, Row
from lieattn.certify._clouds import moved
from lieattn.certify._kinds import Kind
from lieattn.certify._measure import TOLERANCES, certify

__all__ = ["TOLERANCES", "Certificate", "Diagnosis", "Kind", "Row", "certify", "moved"]
