"""Verification rules: pure functions from a draft, the target's law and random numbers to a verdict."""

from foredraft.verify.block import block
from foredraft.verify.coupled import coupled
from foredraft.verify.exact import exact
from foredraft.verify.rejection import rejection

__all__ = ["block", "coupled", "exact", "rejection"]
