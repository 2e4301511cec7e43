"""How much of a mixture of experts a pass over several rows reads: more rows touch more experts, so they are not free.

With independent routing n rows, each of which takes ``top_k`` of E experts, touch ``E (1 - (1 - top_k/E)^n)`` of them
on average. A pass that is bound by reading weights costs in that proportion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.models.shape import DecoderShape

PassPrior = Callable[[float], float]
"""Rows of a pass -> its expected cost over that of a pass of one row; 1 for one row, never decreasing."""


def touched(experts: int, top_k: int, rows: float) -> float:
    """Experts that ``rows`` independently routed rows touch on average.

    Args:
        experts: E, at least 1.
        top_k: Experts a row, ``1 <= top_k <= experts``.
        rows: At least 0.
    """
    return experts * (1 - float((1 - top_k / experts) ** rows))


def pass_prior(dense: float, expert: float, experts: int, top_k: int) -> PassPrior:
    """The expected cost of a pass by its rows, reading of weights alone.

    Args:
        dense: Weights that every pass reads, in any unit.
        expert: Weights of one expert, summed over the layers, in the same unit.
    """
    one = dense + expert * top_k
    return lambda rows: (dense + expert * touched(experts, top_k, rows)) / one


def prior_of_shape(shape: DecoderShape) -> PassPrior | None:
    """The prior of a built-in decoder; None for one without experts, whose rows read nothing more."""
    moe = shape.moe
    sparse = sum(map(shape.is_moe, range(shape.layers)))
    if moe is None or not sparse:
        return None
    d = shape.hidden_size
    attention = d * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    dense_mlp = 3 * d * shape.intermediate_size * (shape.layers - sparse)
    always = sparse * (d * moe.experts + 3 * d * moe.shared_intermediate)
    dense = shape.layers * attention + dense_mlp + always + shape.vocab_size * d
    return pass_prior(dense, 3 * d * moe.intermediate * sparse, moe.experts, moe.top_k)


def prior_of_module(model: Any, config: Any) -> PassPrior | None:
    """The prior of a transformers model; None where its configuration or its weights name no experts."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int)), 0)
    top_k = getattr(config, "num_experts_per_tok", None)
    sizes = [(name, weight.numel()) for name, weight in model.named_parameters()]
    routed = sum(size for name, size in sizes if ".experts." in name)
    if not routed or not isinstance(top_k, int) or not 1 <= top_k <= experts:
        return None
    return pass_prior(sum(size for _, size in sizes) - routed, routed / experts, experts, top_k)
