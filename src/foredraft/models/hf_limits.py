"""What of a transformers model can be run losslessly, read off its configuration and its forward pass."""

from __future__ import annotations

import inspect
from typing import Any

from foredraft.errors import ConfigError, UnsupportedModelError

_GROWING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest position of the pass, not on the token's own."""


def text_config(model: Any) -> Any:
    """The configuration of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def refuse_encoder_decoder(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{model.config.model_type} has an encoder and a decoder, and only decoder-only models run so far",
            field="model",
            remedy="use a causal language model",
        )


def cache_argument(model: Any) -> str:
    """The name under which this model's forward pass takes a cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):  # the latter before transformers 5.20
        if name in parameters:
            return name
    kept = "a recurrent state" if {"state", "cache_params"} & parameters.keys() else "nothing"
    raise UnsupportedModelError(
        f"the forward pass of {type(model).__name__} takes no cache of keys and values ({kept} is carried from token "
        "to token), so a rejected draft could not be taken back",
        field="model",
        remedy="use a model whose layers all attend to stored keys and values",
    )


def takes(model: Any, argument: str) -> bool:
    """Whether the forward pass has a parameter of that name."""
    return argument in inspect.signature(model.forward).parameters


def context_limit(config: Any, wanted: int | None) -> int | None:
    """Most tokens of a slot: what the user wants, no more than the model can do.

    A model with a rotary embedding that changes once the text grows past a length is held under that length: beyond it
    a token's logits depend on how many tokens share its pass, so speculation could not be lossless.

    Raises:
        ConfigError: ``wanted`` is below 1 or above the limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    limit = int(limit) if limit else None
    steady = _steady_length(config)
    reason = "this model's positions"
    if steady is not None and (limit is None or steady < limit):
        limit, reason = steady, "the length from which this model's rotary embedding depends on the size of a pass"
    if wanted is None:
        return limit
    if wanted < 1 or (limit is not None and wanted > limit):
        bound = f"between 1 and {limit}, {reason}" if limit is not None else "at least 1"
        raise ConfigError(f"must be {bound} (got {wanted})", field="max_context")
    return wanted


def _steady_length(config: Any) -> int | None:
    """Up to which length rotary angles do not depend on the pass; None if they never do."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    growing = [kind for kind in kinds if kind.get("rope_type") in _GROWING_ROPE]
    if not growing:
        return None
    original = [kind.get("original_max_position_embeddings") for kind in growing]
    original += [getattr(config, "original_max_position_embeddings", None)]
    known = [int(length) for length in original if length]
    return min(known) if known else int(config.max_position_embeddings)
