"""From a prompt and its options to a request, or to an error that names what cannot be honoured."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foredraft import kernels
from foredraft.config import DraftingOptions, SamplingParams, SpeculationConfig
from foredraft.drafters.choice import NONE
from foredraft.engine.controller import Acceptance
from foredraft.engine.request import Request
from foredraft.engine.stream import TextStream
from foredraft.engine.structures import Structures
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.models.base import Target
from foredraft.sampling.drafting import RequestSampler
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import RequestNoise, fresh_seed
from foredraft.types import RuleName

if TYPE_CHECKING:
    from foredraft.models.tokenizer import Tokenizer


_numbers = itertools.count()  # of all engines: one drafter may serve several, and tells requests by their id


class Admission:
    """Checks prompts and options against one target and makes requests of them.

    Args:
        target: The model that verifies.
        tokenizer: Its tokenizer; None for models of token ids only.
        defaults: How requests are drafted that do not say.
        clock: Monotonic seconds.
        drafters: Names that a request can choose from; the first serves those that do not say.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None,
        defaults: DraftingOptions,
        clock: Callable[[], float],
        drafters: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.defaults = SpeculationConfig(k=defaults.k, max_k=defaults.max_k, verify=defaults.verify)
        self.drafters = drafters
        self.clock = clock
        self._structures = Structures(tokenizer, target.vocab_size)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        speculation: SpeculationConfig | None,
        tenant: str,
    ) -> Request:
        """Makes a request.

        Raises:
            ConfigError: Named after the field that cannot be honoured.
            ContextLengthError: The prompt, or ``min_tokens`` after it, does not fit.
        """
        params = SamplingParams() if params is None else params
        speculation = self.defaults if speculation is None else speculation
        _check_type(params, SamplingParams, "params")
        _check_type(speculation, SpeculationConfig, "speculation")
        ids = self._encode(prompt)
        problem = getattr(self.target, "prompt_problem", None)
        if params.prompt_logprobs is not None and problem:
            raise ConfigError(f"prompts of this model have none: {problem}", field="prompt_logprobs", remedy="drop it")
        eos = self.tokenizer.eos_ids if self.tokenizer else frozenset()
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        rule = choose_rule(params, speculation)
        seed = fresh_seed() if params.seed is None else params.seed
        law = TokenLaw(
            params,
            ids,
            self.target.vocab_size,
            eos_ids=end_ids,
            bad_words_ids=self._bad_words(params.bad_words),
            grammar=self._structures.grammar(params, end_ids),
        )
        noise = RequestNoise(seed, kernels.race if kernels.available() else None)
        return Request(
            id=f"r{next(_numbers)}",
            ids=ids,
            prompt_length=len(ids),
            params=params,
            speculation=speculation,
            rule=rule,
            law=law,
            noise=noise,
            sampler=RequestSampler(law, noise, rule),
            stream=self._stream(params),
            end_ids=end_ids,
            budget=self._budget(len(ids), params),
            seed=seed,
            tenant=tenant,
            submitted_at=self.clock(),
            acceptance=Acceptance(),
            drafter=self._drafter(speculation),
        )

    def _drafter(self, speculation: SpeculationConfig) -> str:
        """Name of the drafter that serves the request."""
        wanted = speculation.drafter
        if wanted is not None and wanted not in self.drafters:
            there = f"choose one of {', '.join(self.drafters)}" if self.drafters else "this engine has none: drop it"
            raise ConfigError(f"no drafter is called {wanted!r:.80} here", field="drafter", remedy=there)
        return wanted or next(iter(self.drafters), NONE)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this target has no tokenizer", field="prompt", remedy="give a list of token ids")
            ids = self.tokenizer.encode(prompt) if prompt else []
        else:
            try:
                if isinstance(prompt, bytes):
                    raise TypeError("bytes must be decoded first")
                ids = [operator.index(token) for token in prompt]
            except TypeError as error:
                raise ConfigError(f"is neither text nor a sequence of token ids ({error})", field="prompt") from None
        if not ids:
            raise ConfigError("the prompt is empty", field="prompt", remedy="give at least one token of text")
        vocab = self.target.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong} is outside 0…{vocab - 1}", field="prompt")
        return ids

    def _budget(self, prompt_length: int, params: SamplingParams) -> int:
        limit = self.target.max_context
        if limit is None:
            if params.max_tokens is None:
                raise ConfigError("this target has no context limit", field="max_tokens", remedy="set max_tokens")
            return params.max_tokens
        if prompt_length > limit or (prompt_length == limit and params.max_tokens != 0):
            raise ContextLengthError(
                f"has {prompt_length} tokens, the context holds {limit} with at least one of output",
                field="prompt",
                remedy="shorten the prompt or raise max_context",
            )
        room = limit - prompt_length
        if params.min_tokens > room:
            raise ContextLengthError(
                f"{params.min_tokens} is above the {room} tokens that the context has left",
                field="min_tokens",
                remedy="lower it, shorten the prompt or raise max_context",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and after a space."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise ConfigError("this target has no tokenizer", field="bad_words", remedy="use bad_token_ids")
        spellings = {text for word in words for text in (word, " " + word.lstrip())}
        return tuple(sorted(tuple(self.tokenizer.encode(text, special=False)) for text in spellings))

    def _stream(self, params: SamplingParams) -> TextStream:
        if self.tokenizer is None:
            if params.stop:
                raise ConfigError("this target has no tokenizer", field="stop", remedy="use stop_token_ids")
            return TextStream(None)
        return TextStream(self.tokenizer.stream_decoder(), params.stop, params.include_stop)


def _check_type(value: object, wanted: type, field: str) -> None:
    if not isinstance(value, wanted):
        raise ConfigError(f"must be a {wanted.__name__}, not {type(value).__name__}", field=field)


def choose_rule(params: SamplingParams, speculation: SpeculationConfig) -> RuleName:
    """The verification rule of a request; see :class:`~foredraft.config.SpeculationConfig`."""
    if params.greedy:
        return "exact"
    if speculation.verify != "auto":
        return speculation.verify
    return "block" if params.seed is None else "coupled"
