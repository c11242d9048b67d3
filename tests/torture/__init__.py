"""Kills, interrupts and full disks at random moments of whatever the library does for long or writes to disk.

``make torture`` runs it, and writes its rows of docs/fuzz.json and docs/trust.md; a small part runs in the suite.
"""
