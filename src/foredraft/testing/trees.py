"""Every token tree of one shape that a drafter may propose, with its exact probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foredraft.testing.law import Prefix, Proposal
from foredraft.types import Draft

_Node = tuple[int, int, "Tensor | None"]  # its number in ``parents``, its token, the law that the token was drawn from


def trees(
    q: Proposal, parents: Sequence[int], prefix: Prefix = (), *, replace: bool = False
) -> Iterator[tuple[Draft, float]]:
    """Every tree of one shape that the drafter may propose after ``prefix``, with its probability.

    Args:
        q: The law that a node's token is drawn from, by its path; a token that is not drawn is proposed for every
            child.
        parents: As in :class:`~foredraft.types.Draft`.
        replace: Draw siblings independently, so that they may be equal; else without replacement. A node whose elder
            siblings have taken every token is left out, with all below it.
    """
    yield from _grown(q, parents, prefix, replace, (), 1.0)


def _grown(
    q: Proposal, parents: Sequence[int], prefix: Prefix, replace: bool, nodes: tuple[_Node | None, ...], weight: float
) -> Iterator[tuple[Draft, float]]:
    at = len(nodes)
    if at == len(parents):
        yield _tree(parents, [node for node in nodes if node is not None]), weight
        return
    parent = parents[at]
    row: Tensor | int | None = None
    if parent < 0 or nodes[parent] is not None:
        path: Prefix = ()
        while parent >= 0:
            path, parent = (nodes[parent][1], *path), parents[parent]  # type: ignore[index]
        row = q(prefix + path)
    if isinstance(row, int):
        yield from _grown(q, parents, prefix, replace, (*nodes, (at, row, None)), weight)
        return
    if row is not None and not replace:
        row = row.clone()
        row[[node[1] for node in nodes if node is not None and parents[node[0]] == parents[at]]] = 0.0
        row = row / row.sum() if float(row.sum()) > 0 else None
    if row is None:
        yield from _grown(q, parents, prefix, replace, (*nodes, None), weight)
        return
    for token, probability in enumerate(row.tolist()):
        if probability > 0:
            yield from _grown(q, parents, prefix, replace, (*nodes, (at, token, row)), weight * probability)


def _tree(parents: Sequence[int], nodes: Sequence[_Node]) -> Draft:
    number = {node[0]: i for i, node in enumerate(nodes)} | {-1: -1}
    laws = [node[2] for node in nodes if node[2] is not None]
    return Draft(
        tuple(node[1] for node in nodes),
        torch.stack(laws) if laws else None,
        tuple(number[parents[node[0]]] for node in nodes),
    )
