"""Public testing tools for people who write drafters, rules or models: fakes, and laws by exact enumeration."""

from foredraft.testing.table import ScriptedDrafter, TableModel

__all__ = ["ScriptedDrafter", "TableModel"]
