"""The only schema: one field here is one option of the library, the command line, saved results and, later, the server.

Invalid values raise :class:`~foredraft.errors.ConfigError` naming the field; unknown fields are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from foredraft.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy decoding, for target and drafter alike: dividing logits by less
overflows float32 long before the law differs from the argmax."""


_STRUCTURES = ("json_schema", "json_object", "regex", "grammar")


class Schema(BaseModel):
    """A frozen pydantic model whose errors are ours."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise config_error(error) from None


def config_error(error: ValidationError) -> ConfigError:
    """Turns pydantic's first complaint into one sentence that names the field."""
    first = error.errors()[0]
    if isinstance(ours := first.get("ctx", {}).get("error"), ConfigError):
        return ours
    field = ".".join(str(part) for part in first["loc"]) or None
    if first["loc"][:1] == ("k",):
        return ConfigError(f"must be a number from 0 to 128, or auto (got {first['input']!r:.80})", field="k")
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown option", field=field, remedy="check its spelling against the documentation")
    problem = first["msg"].removeprefix("Value error, ")
    problem = problem[:1].lower() + problem[1:]
    return ConfigError(f"{problem} (got {first['input']!r:.80})" if field else problem, field=field)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _json_text(value: Any) -> Any:
    """A schema as JSON text, given as text or as data; the order of its keys is kept."""
    if value is None or (isinstance(value, str) and _is_json(value)):
        return value
    if not isinstance(value, dict | bool):
        raise ConfigError("is neither a schema nor JSON text", field="json_schema")
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"is not JSON ({error})", field="json_schema") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON ({error})", field="json_schema") from None
    return True


class SamplingParams(Schema):
    """How the tokens of one request are drawn and when it ends. Every control holds at every draft position.

    The filters apply in this order: processors, penalties, bias and bans; temperature; top-k; top-p; min-p;
    typical-p. The result, renormalised, is the law of the output, with speculation or without.
    """

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    """0 is greedy decoding; 1 is the model's own law."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches p."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep tokens at least min_p times as likely as the likeliest."""
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Locally typical sampling (Meister 2022, arXiv 2202.00666): keep mass p nearest to the entropy."""
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar 2019)."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted once from the logits of tokens seen in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens seen in the output, once per occurrence."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """Token id -> number added to its logit."""
    bad_words: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Words that must not appear; needs a tokenizer."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear: the last token of each is banned where the others precede it."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be drawn (end-of-sequence tokens must be listed to be allowed)."""
    json_schema: Annotated[str, BeforeValidator(_json_text)] | None = None
    """The text is JSON that satisfies this JSON Schema; needs a tokenizer."""
    json_object: bool = False
    """The text is a JSON object."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The whole text matches this regular expression (no look-around, no back-references)."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """The text satisfies this context-free grammar, in Lark or in GBNF (EBNF) notation."""
    structured_after: Annotated[str, Field(min_length=1)] | None = None
    """With one of the four above: the text is free until this marker, such as ``</think>``."""
    structured_until: Annotated[str, Field(min_length=1)] | None = None
    """With one of the four: this marker follows the structure, then the text is free again."""
    processors: tuple[Callable[..., Any], ...] = ()
    """Custom logits processors, see :mod:`foredraft.sampling.processors`."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """End-of-sequence and stop tokens are banned until this many tokens are out."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens to write; none: on to the end of the context."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """The text ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The output ends with the first of these tokens."""
    include_stop: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of this request's random numbers; without it a fresh one is drawn, and returned with the result."""
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """Return log-probabilities of each token under the model's unfiltered law, and of this many likeliest others."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """The same of each token of the prompt but the first; with max_tokens = 0 the prompt is only scored."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def structured_field(self) -> str | None:
        """Which of the four kinds of structure is asked for, by field name."""
        return next(iter(self._structures()), None)

    def _structures(self) -> list[str]:
        return [field for field in _STRUCTURES if getattr(self, field) not in (None, False)]

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"{self.min_tokens} is above max_tokens {self.max_tokens}", field="min_tokens")
        for field in ("stop", "bad_words", "bad_token_ids"):
            if any(not entry for entry in getattr(self, field)):
                raise ConfigError("an entry is empty", field=field, remedy="remove it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("the list is empty, so no token could be drawn", field="allowed_token_ids")
        structures = self._structures()
        if len(structures) > 1:
            raise ConfigError(f"cannot be joined with {structures[0]}", field=structures[1], remedy="give one of them")
        for field in ("structured_after", "structured_until"):
            if getattr(self, field) is not None and not structures:
                raise ConfigError(f"needs one of {', '.join(_STRUCTURES)}", field=field)
        return self


VerifyChoice = Literal["auto", "rejection", "block", "coupled"]


class DraftingOptions(Schema):
    """How long drafts are and how they are checked: what an engine and each of its requests can say."""

    k: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] = "auto"
    """Drafted tokens a step; ``auto`` follows measured costs and acceptance, down to 0 and back."""
    max_k: Annotated[int, Field(ge=1, le=128)] = 16
    """Most that ``auto`` may draft."""
    verify: VerifyChoice = "auto"
    """Verification rule for T > 0 (greedy is always exact match). ``auto``: coupled for seeded requests, so that
    a seed gives one text whatever the drafter and k; block verification otherwise."""


class SpeculationConfig(DraftingOptions):
    """How one request is drafted and checked."""

    drafter: Annotated[str, Field(min_length=1)] | None = None
    """Name of one of the engine's drafters; none: the first."""


class EngineConfig(DraftingOptions):
    """Limits of one engine."""

    max_batch: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests decoded together; more wait."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 512
    """Most prompt tokens in one pass; longer prompts are read in chunks so that others keep streaming."""
    guard: bool = False
    """Watch acceptance by request and by tenant, and stop drafting for those for whom it does not pay."""
    guard_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = "auto"
    """Share of drafted tokens that must be accepted for drafting to pay; ``auto`` computes it from measured costs."""
    guard_false_alarm: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Most that the probability may be that the guard's test stops a request or tenant for whom drafting pays."""
    guard_request_waste: Annotated[float, Field(gt=0)] = 64.0
    """Positions that one request may have verified for nothing before it stops drafting."""
    guard_tenant_waste: Annotated[float, Field(gt=0)] = 256.0
    """Positions that all requests of one tenant may have verified for nothing before it stops drafting."""
    prefix_reuse: bool = True
    """Keep the cache of finished requests, while slots are idle, for later prompts of the same tenant."""
