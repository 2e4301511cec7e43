"""Drafters, and how to add one: see docs/writing-a-drafter.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter as Drafter
    from foredraft.drafters.base import DrafterContext as DrafterContext
    from foredraft.drafters.base import DraftRequest as DraftRequest
    from foredraft.drafters.choice import ChoiceDrafter as ChoiceDrafter
    from foredraft.drafters.combined import CombinedDrafter as CombinedDrafter
    from foredraft.drafters.lookup import LookupDrafter as LookupDrafter
    from foredraft.drafters.model import ModelDrafter as ModelDrafter
    from foredraft.drafters.outlook import Outlook as Outlook
    from foredraft.drafters.registry import create as create
    from foredraft.drafters.registry import entries as entries
    from foredraft.drafters.suffix import SuffixDrafter as SuffixDrafter

_WHERE = {
    "ChoiceDrafter": "choice",
    "CombinedDrafter": "combined",
    "DraftRequest": "base",
    "Drafter": "base",
    "DrafterContext": "base",
    "LookupDrafter": "lookup",
    "ModelDrafter": "model",
    "Outlook": "outlook",
    "SuffixDrafter": "suffix",
    "create": "registry",
    "entries": "registry",
}

__all__ = [
    "ChoiceDrafter",
    "CombinedDrafter",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "LookupDrafter",
    "ModelDrafter",
    "Outlook",
    "SuffixDrafter",
    "create",
    "entries",
]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that one drafter never needs another's dependencies."""
    if name in _WHERE:
        return getattr(import_module(f"foredraft.drafters.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'foredraft.drafters' has no attribute {name!r}")
