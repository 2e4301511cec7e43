"""What the rules for trees share: who is whose child, and the walk of a target that draws its own tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foredraft.errors import ConfigError, DrafterError
from foredraft.types import Draft, Verdict


def children(draft: Draft, rows: int) -> list[list[int]]:
    """Nodes that follow each of the k+1 rows of the target's pass, in drafted order; row 0 is the committed text.

    Raises:
        ConfigError: Not k+1 rows.
        DrafterError: ``parents`` is no tree.
    """
    if rows != draft.k + 1:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k + 1} rows of the target, not {rows}", field="p")
    parents = range(-1, draft.k - 1) if draft.parents is None else draft.parents
    if len(parents) != draft.k or any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise DrafterError("each node needs an earlier node or -1 as its parent", field="parents")
    found: list[list[int]] = [[] for _ in range(rows)]
    for node, parent in enumerate(parents):
        found[parent + 1].append(node)
    return found


def walk(draft: Draft, rows: int, vocab_size: int | None, token_at: Callable[[int, int], int]) -> Verdict:
    """Follows the target's own tokens into the tree as far as they are in it.

    Args:
        token_at: ``token_at(row, depth)`` is the target's token at a row of its pass.
    """
    follow = children(draft, rows)
    if draft.k and (min(draft.tokens) < 0 or (vocab_size is not None and max(draft.tokens) >= vocab_size)):
        raise DrafterError(f"a drafted token is not in [0, {vocab_size})", field="tokens")
    path: list[int] = []
    row = 0
    while True:
        token = token_at(row, len(path))
        node = next((child for child in follow[row] if draft.tokens[child] == token), None)
        if node is None:
            return Verdict(len(path), token, not follow[row], tuple(path))
        path.append(node)
        row = node + 1


def share(rest: Tensor, draft: Draft, node: int, q_mass: float) -> float:
    """``rest(x) / q(x)`` at a node's token; ``rest [V]`` is a law, ``q_mass`` the sum of the node's row of q."""
    token = draft.tokens[node]
    q = 1.0 if draft.q is None else float(draft.q[node, token]) / q_mass
    return float(rest[token]) / q


def excess(weight: float, rest: Tensor, draft: Draft, node: int, q_mass: float) -> Tensor:
    """``[V]`` float64: ``max(weight * rest - q, 0)``, what a node whose token was not accepted leaves to be written."""
    left = rest * weight
    if draft.q is None:
        left[draft.tokens[node]] = 0.0  # weight * rest - 1 is never above 0
        return left
    return left.sub_(draft.q[node].to(left) / q_mass).clamp_(min=0.0)
