"""Request bodies. Unknown fields are refused; sampling fields come from the schema of the library.

Numbers must be numbers: ``"0.5"`` is refused where 0.5 is meant. ``null`` is the same as leaving a field out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

from foredraft.config import SamplingParams, VerifyChoice

NOT_ON_THE_WIRE = {"processors", "prompt_logprobs"}  # code; and what echo with logprobs asks for
SPELLED_ANEW = {"logprobs", "logit_bias", "stop", "temperature", "max_tokens", "json_schema"}
"""Fields that OpenAI spells otherwise or gives another default."""


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SpeculationBody(Body):
    """How this request is drafted and verified, within the operator's limits."""

    drafter: str | None = None
    """One of the server's drafters, by name; without it the first."""
    k: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] | None = None
    max_k: Annotated[int, Field(ge=1, le=128)] | None = None
    verify: VerifyChoice | None = None
    off: bool = False
    """Plain decoding."""
    stats: Literal["off", "summary", "detailed"] = "off"
    """Whether the response carries ``metrics.speculative_decoding``."""


class StreamOptions(Body):
    """What a stream holds besides text."""

    include_usage: bool = False


def _wire(annotation: Any) -> Any:
    """A field's type as JSON has it: tuples are lists."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return list[_wire(args[0])]  # type: ignore[misc]
    return annotation


def _sampling_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in SamplingParams.model_fields.items():
        if name not in NOT_ON_THE_WIRE | SPELLED_ANEW:
            metadata = tuple(part for part in field.metadata if "Validator" not in type(part).__name__)
            kind = _wire(field.annotation)
            fields[name] = (Optional[Annotated[(kind, *metadata)] if metadata else kind], None)  # noqa: UP045
    return fields


if TYPE_CHECKING:

    class SamplingBody(Body):
        """The sampling controls of the library under their own names."""

else:
    SamplingBody = create_model("SamplingBody", __base__=Body, **_sampling_fields())

SAMPLING_NAMES = frozenset(_sampling_fields())
Text = Annotated[str, Field(max_length=4096)]


class DecodeBody(SamplingBody):
    """What completions and chats have in common."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """1 where it is left out, as in OpenAI's API."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    json_schema: dict[str, Any] | str | None = None
    """JSON Schema that the text satisfies, as an object or as text."""
    response_format: dict[str, Any] | None = None
    """OpenAI's spelling: ``text``, ``json_object``, or ``json_schema`` with a schema."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    """Not interpreted, but for ``category``: a word under which the request is counted in /stats."""
    speculation: SpeculationBody | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Lower numbers are served first."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds in which it must finish."""
    return_token_ids: bool | None = None
    """Adds ``token_ids``, and ``tokens`` that say of each how it came to be."""


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(DecodeBody):
    """Body of ``POST /v1/completions``."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1)]
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(Body):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier answer called; ``arguments`` is JSON as text."""

    name: Text
    arguments: str


class EarlierCall(Body):
    """A call in an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[EarlierCall], Field(min_length=1)] | None = None
    tool_call_id: Text | None = None
    refusal: None = None


class ChatBody(DecodeBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], bool | int | str] | None = None
    """Further variables of the model's chat template, such as ``enable_thinking``."""


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
