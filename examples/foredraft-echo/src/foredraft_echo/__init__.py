"""A drafter that expects the output to repeat the prompt."""

from __future__ import annotations

from typing import Self

from foredraft.drafters import Drafter, DrafterContext, DraftRequest
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft


class EchoDrafter(Drafter):
    """Proposes what follows the last token in the prompt, after its latest occurrence there.

    Args:
        longest: Most tokens to propose at once, at least 1.
    """

    name = "echo"

    def __init__(self, longest: int = 8) -> None:
        if longest < 1:
            raise ConfigError(f"must be at least 1 (got {longest})", field="drafter echo", remedy="for example echo:8")
        self.longest = longest
        self._after: dict[str, dict[int, int]] = {}  # request id -> token -> the position after it

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        """``--drafter echo`` or ``--drafter echo:LONGEST``."""
        if argument is None:
            return cls()
        if not argument.isdecimal():
            raise ConfigError(f"{argument!r} is not a number", field="drafter echo", remedy="for example echo:8")
        return cls(int(argument))

    def start(self, request: DraftRequest) -> None:
        prompt = request.ids[: request.prompt_length]
        self._after[request.id] = {token: position + 1 for position, token in enumerate(prompt[:-1])}

    def propose(self, request: DraftRequest, k: int) -> Draft:
        begin = self._after[request.id].get(request.ids[-1])
        if begin is None:
            return NO_DRAFT
        end = min(begin + min(k, self.longest), request.prompt_length)
        return Draft(tuple(request.ids[begin:end]))

    def stop(self, request: DraftRequest) -> None:
        self._after.pop(request.id, None)
