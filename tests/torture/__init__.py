"""Kills, interrupts and full disks at random moments of long operations and of operations that write to disk.

``make torture`` runs it, and writes its rows of docs/records/fuzz.json and docs/trust.md. A small part runs in the
suite.
"""
