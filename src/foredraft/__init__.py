"""Lossless speculative decoding: a cheap drafter writes ahead, the target checks, the law of the output stays.

>>> from foredraft import Engine, SamplingParams
>>> engine = Engine(target="smollm2-135m", drafter="lookup")       # doctest: +SKIP
>>> engine.generate("The capital of France is")[0].text            # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft import drafters as drafters
    from foredraft.config import SamplingParams as SamplingParams
    from foredraft.config import SpeculationConfig as SpeculationConfig
    from foredraft.engine.engine import Engine as Engine
    from foredraft.engine.result import Result as Result
    from foredraft.engine.result import StreamDelta as StreamDelta
    from foredraft.errors import ForedraftError as ForedraftError

__version__ = "0.1.0"

_WHERE = {
    "Engine": "foredraft.engine.engine",
    "ForedraftError": "foredraft.errors",
    "Result": "foredraft.engine.result",
    "SamplingParams": "foredraft.config",
    "SpeculationConfig": "foredraft.config",
    "StreamDelta": "foredraft.engine.result",
}

__all__ = ["Engine", "ForedraftError", "Result", "SamplingParams", "SpeculationConfig", "StreamDelta", "drafters"]


def __getattr__(name: str) -> Any:
    """Imports on first use: ``foredraft --help`` must not wait for torch."""
    if name == "drafters":
        return import_module("foredraft.drafters")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
