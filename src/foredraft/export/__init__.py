"""Taking a drafter elsewhere: checkpoints that other servers load."""

from foredraft.export.speculators import export_head, write_head

__all__ = ["export_head", "write_head"]
