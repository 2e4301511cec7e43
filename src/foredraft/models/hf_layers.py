"""Reads hidden states out of a transformers model by watching its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList | None:
    """The list of the model's ``count`` decoder layers: the outermost list of that length; None if there is none."""
    for module in model.modules():  # outer modules come first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None


@contextmanager
def watching(layers: nn.ModuleList | None, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While open, every pass leaves the hidden states of the named taps, ``[1, T, d]`` each, in the yielded dict.

    Watching the layers, rather than asking for ``output_hidden_states``, gives the last layer's own output: what
    transformers returns there is already normalised.
    """
    kept: dict[int, Tensor] = {}
    if not taps:
        yield kept
        return
    if layers is None:
        raise UnsupportedModelError(
            "its decoder layers cannot be found, so hidden states cannot be tapped",
            field="taps",
            remedy="use a drafter that needs no hidden states",
        )
    handles = []
    if 0 in taps:

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[0] = args[0] if args else kwargs["hidden_states"]

        handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
    for tap in set(taps) - {0}:

        def after(_: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
            kept[tap] = output if isinstance(output, Tensor) else output[0]

        handles.append(layers[tap - 1].register_forward_hook(after))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
