"""What ``--drafter tree:…`` may say."""

from __future__ import annotations

from typing import Any

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.tree import NodeScorer
from foredraft.errors import ConfigError

OPTIONS = ("depth", "branch", "nodes", "beam")
FORM = "MODEL, eagle3, eagle3:FOLDER or eagle1:FOLDER, then any of depth=6,branch=4,nodes=16,beam=4,static"
HOW = f"after tree: write {FORM}"


def parse(argument: str | None, context: DrafterContext) -> tuple[NodeScorer, dict[str, Any]]:
    """Loads the scorer and reads the options, arguments of :class:`~foredraft.drafters.tree.TreeDrafter`.

    Raises:
        ConfigError: Not of the form above.
    """
    name, *options = (argument or "").split(",")
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if option == "static":
            values[option] = True
        elif key in OPTIONS and value.isdecimal():
            values[key] = int(value)
        else:
            raise ConfigError(f"option {option!r} is unknown", field="drafter tree", remedy=HOW)
    if not name:
        raise ConfigError("names nothing to draft with", field="drafter tree", remedy=HOW)
    return _scorer(name, context), values


def _scorer(name: str, context: DrafterContext) -> NodeScorer:
    kind, _, folder = name.partition(":")
    if kind == "eagle3":
        from foredraft.drafters.tree_eagle import EagleNodes

        return EagleNodes.from_spec(folder or None, context)
    if kind == "eagle1":
        from foredraft.drafters.eagle1 import Eagle1Nodes

        return Eagle1Nodes.from_spec(folder or None, context)
    from foredraft.drafters.tree_model import ModelNodes

    return ModelNodes.from_spec(name, context)
