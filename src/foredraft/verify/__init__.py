"""Verification rules: pure functions from a draft, the target's law and random numbers to a verdict."""

from foredraft.verify.block import block
from foredraft.verify.coupled import coupled
from foredraft.verify.exact import exact
from foredraft.verify.rejection import rejection
from foredraft.verify.traversal import traversal
from foredraft.verify.tree import coupled_tree, exact_tree, rejection_tree

__all__ = ["block", "coupled", "coupled_tree", "exact", "exact_tree", "rejection", "rejection_tree", "traversal"]
