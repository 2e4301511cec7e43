"""Every error that foredraft raises on purpose, in one tree.

Each message names the field (or file) at fault and says what to do about it, so that a user can act on
the message alone. Catch :class:`ForedraftError` to catch them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ForedraftError(Exception):
    """Base of the tree.

    Args:
        problem: What is wrong, in one sentence without a final full stop.
        field: The option, argument or file at fault, if there is one.
        remedy: What the user can do, in the imperative.
    """

    def __init__(self, problem: str, *, field: str | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.field = field
        self.remedy = remedy
        text = f"{field}: {problem}" if field else problem
        super().__init__(f"{text}; {remedy}" if remedy else text)


class ConfigError(ForedraftError, ValueError):
    """An option or argument has a value that cannot be honoured."""


class ModelLoadError(ForedraftError):
    """A model, tokenizer or checkpoint cannot be found, read or trusted."""


class UnsupportedModelError(ModelLoadError):
    """A model was read but has a shape or cache that foredraft cannot run losslessly."""


class VocabularyMismatchError(ModelLoadError):
    """Target and drafter do not give the same meaning to the same token id."""


class ContextLengthError(ForedraftError, ValueError):
    """A prompt does not fit into the target's context."""


class CacheFullError(ForedraftError):
    """The KV-cache budget cannot hold another slot or a longer one."""


class NumericalError(ForedraftError, ArithmeticError):
    """A row of logits or probabilities is not a law: NaN, +inf, or no token left."""


class DrafterError(ForedraftError):
    """A drafter crashed or broke its contract; the request goes on without it."""


class RequestTimeoutError(ForedraftError):
    """A request got no slot, or did not finish, in the time that it had."""


class RequestFailedError(ForedraftError):
    """At least one request of a batch failed; the others finished.

    Attributes:
        results: One result a request, in order; failed ones carry ``error`` and ``finish_reason == "error"``.
    """

    def __init__(self, problem: str, *, results: Sequence[Any], remedy: str | None = None) -> None:
        super().__init__(problem, remedy=remedy)
        self.results = list(results)
