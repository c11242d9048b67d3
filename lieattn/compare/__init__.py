"""Comparisons of networks under one budget."""

from lieattn._core.messages import needs_extra

with needs_extra("lieattn.compare", "train"):
    from lieattn.compare._build import Sets, build_task
    from lieattn.compare._cell import CellRunner
    from lieattn.compare._match import Matched, in_words, match_models
    from lieattn.compare._records import CellStore, Record, page, report, tables, write_json
    from lieattn.compare._settings import Cell, ModelSettings, Settings, read_settings

__all__ = [
    "Cell",
    "CellRunner",
    "CellStore",
    "Matched",
    "ModelSettings",
    "Record",
    "Sets",
    "Settings",
    "build_task",
    "in_words",
    "match_models",
    "page",
    "read_settings",
    "report",
    "tables",
    "write_json",
]
