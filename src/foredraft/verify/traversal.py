"""Traversal verification: block verification for trees, leaves first (Weng 2025, arXiv 2505.12398).

For every node v there is a procedure F(v, a, p) with this promise: given how v came to be drafted, it ends in v or
below it with probability exactly a, and the text that it then writes behind v has the target's law, with p as the law
of the first token. Else it gives v back. The step is F(root, 1, p_root), which cannot give back.

F tries the children of v in the order in which they were drawn, child x from q given v and its elder siblings:

- F(x, b, p_x) with ``b = min(1, a p(x) / q(x))``. So a text that goes on with x comes out with probability
  ``q(x) b = min(q(x), a p(x))``, and what is still to be written is ``max(a p - q, 0)``, of mass r.
- x was given back with probability ``1 - Σ min(q, a p) = 1 - a + r``. Given that, F goes on with its remaining
  children and
  ``a' = r / (1 - a + r)``, ``p' = max(a p - q, 0) / r``. Neither depends on x: that the next child is drawn from a law
  that does (without x, say) is as good as any other.
- With no child left it ends at v with probability a, and p is the law of the next token.

Each line keeps the promise, for any q_i that child i was really drawn from, so for sampling with and without
replacement and for tokens that were not drawn. Siblings' subtrees must be drawn independently of one another given
the path. On a chain this is block verification. Recursive rejection accepts a child and never comes back to its
siblings; here a child whose own children fail may still be given up for the next, so that more of the tree is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.sampling.draw import draw
from foredraft.types import Draft, Verdict
from foredraft.verify._chain import draft_mass, target_mass
from foredraft.verify._tree import children, excess, share


def traversal(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """Verifies a tree from its leaves to its root.

    Arguments and errors are those of :func:`~foredraft.verify.tree.rejection_tree`. A node is tested at most once, by
    its own uniform. Every uniform counts, also those of nodes that are not accepted: none may be used again.
    """
    follow = children(draft, p.shape[0])
    if len(uniforms) != draft.k:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k} uniforms, not {len(uniforms)}", field="uniforms")
    of_p, of_q = target_mass(p), draft_mass(draft, p.shape[-1])

    def visit(row: int, keep: float) -> tuple[list[int], Tensor] | None:
        """F(v, keep, p): nodes accepted below v and the law of the next token, or None if v is given back."""
        if not keep > 0.0:
            return None
        rest = p[row].double() / of_p[row]
        for node in follow[row]:
            found = visit(node + 1, min(1.0, keep * share(rest, draft, node, of_q[node])))
            if found is not None:
                return [node, *found[0]], found[1]
            left = excess(keep, rest, draft, node, of_q[node])
            mass = float(left.sum())
            if mass > 0.0:
                rest, keep = left / mass, mass / (mass + (1.0 - keep))
            elif keep < 1.0:
                return None
            # else p and q agree to the last digit, and only rounding can have given the child back
        return ([], rest) if row == 0 or uniforms[row - 1] < keep else None

    found = visit(0, 1.0)
    assert found is not None  # keep stays 1 at the root
    path, rest = found
    bonus = not follow[path[-1] + 1 if path else 0]
    return Verdict(len(path), draw(rest, next_uniform), bonus, tuple(path))
