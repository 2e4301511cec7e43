"""Rules for token trees that go from the root down: greedy, coupled, and recursive rejection.

In a draft with ``parents`` several nodes may follow one token; row 0 of the target's pass is the last committed
token's, row i + 1 that of node i. A chain is a tree, too: there these rules are those of ``exact``, ``coupled`` and
``rejection``.

Recursive rejection (SpecInfer, arXiv 2305.09781; without replacement as in arXiv 2401.15077). At a node whose children
were drawn one after the other, each from its own law q_i given its elder siblings, let ``p_0 = p``. Child i is accepted
with probability ``min(1, p_i(x) / q_i(x))``, and if it is not, ``p_{i+1} = max(p_i - q_i, 0)``, normalised, is what is
still to be written. That is modified rejection sampling with the rest of the procedure, whose law is p_{i+1} by the
same argument, in place of the correction. Nothing is asked of q_i but that child i was drawn from it: without
replacement it is q with the elder siblings zeroed and renormalised, with replacement it is q itself (then siblings
may be equal), and for a token that was not drawn it is one-hot (then the rule is p's own draw, walking into the child
that equals it).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.sampling.draw import NoiseRow, Rows, draw, race
from foredraft.types import Draft, Verdict
from foredraft.verify._chain import draft_mass, target_mass
from foredraft.verify._tree import children, excess, share, walk


def exact_tree(draft: Draft, argmax: Sequence[int]) -> Verdict:
    """Greedy decoding: walks into the child that is the target's argmax, as long as there is one.

    Args:
        draft: A tree of k nodes; q does not matter.
        argmax: k+1 token ids, row i + 1 given the path to node i.
    """
    return walk(draft, len(argmax), None, lambda row, depth: argmax[row])


def coupled_tree(draft: Draft, p: Rows, exponentials: Sequence[Tensor | NoiseRow] | Tensor) -> Verdict:
    """Walks into the child that is the target's own draw (see :func:`~foredraft.verify.coupled.coupled`).

    The noise of a position is shared by all nodes at that depth. Only one of them is ever raced: the one on the path of
    the target's own draws. So the text is a function of noise and p, whatever the tree holds.

    Args:
        draft: A tree of k nodes; q does not matter.
        p: ``[k+1, V]`` post-filter law of the target.
        exponentials: ``draft.depth + 1`` rows ``[V]`` of standard exponential noise, one a position of the step.
    """
    if len(exponentials) != draft.depth + 1:
        raise ConfigError(f"a tree {draft.depth} deep needs {draft.depth + 1} rows of noise", field="exponentials")
    return walk(draft, p.shape[0], p.shape[-1], lambda row, depth: race(p[row], exponentials[depth]))


def rejection_tree(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """Tries the children of each accepted node in order; where all are rejected, writes what they left of p.

    Args:
        draft: A tree of k nodes; row i of q is the law that node i was drawn from, given its path and elder siblings.
        p: ``[k+1, V]`` post-filter law of the target.
        uniforms: k numbers in ``[0, 1)``, one a node, independent of the draft and of one another.
        next_uniform: One more, for the next token.

    Raises:
        NumericalError: A row of p is not a law.
        DrafterError: A row of q is not a law, a token cannot have been drawn from it, or ``parents`` is no tree.
    """
    follow = children(draft, p.shape[0])
    if len(uniforms) != draft.k:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k} uniforms, not {len(uniforms)}", field="uniforms")
    of_p, of_q = target_mass(p), draft_mass(draft, p.shape[-1])
    path: list[int] = []
    row = 0
    while True:
        rest = p[row].double() / of_p[row]
        for node in follow[row]:
            if uniforms[node] < share(rest, draft, node, of_q[node]):
                break
            left = excess(1.0, rest, draft, node, of_q[node])
            mass = float(left.sum())
            if mass > 0.0:  # else p and q agree to the last digit, and only rounding can have rejected
                rest = left / mass
        else:
            return Verdict(len(path), draw(rest, next_uniform), not follow[row], tuple(path))
        path.append(node)
        row = node + 1
