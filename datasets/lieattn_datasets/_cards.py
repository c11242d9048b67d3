"""What a data set is, in words."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """Source, terms (license) and size of a data set; each has one as ``card``. The README has the details."""

    source: str
    terms: str
    size: str
