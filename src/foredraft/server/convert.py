"""From a request body to prompts, sampling parameters and speculation, or to an error that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.config import SamplingParams, SpeculationConfig
from foredraft.engine.engine import Engine
from foredraft.engine.request import Request
from foredraft.errors import ConfigError
from foredraft.server.bodies import SAMPLING_NAMES, ChatBody, CompletionBody, DecodeBody, Message
from foredraft.server.config import ServerConfig
from foredraft.server.errors import api_error, invalid
from foredraft.server.keys import Client
from foredraft.server.runner import Labels
from foredraft.server.service import Service
from foredraft.server.tools import Tools, structured_fields

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as in OpenAI's API."""

_CATEGORY = re.compile(r"[a-z0-9_-]{1,32}")
_TEMPLATE_VARIABLES = {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a body asks for, checked as far as it can be without reading its prompts.

    Attributes:
        params: How tokens are drawn.
        speculation: How they are drafted.
        n: Answers a prompt.
        labels: How the requests are counted.
        priority: Lower numbers are served first.
        timeout: Seconds; None for no limit.
    """

    params: SamplingParams
    speculation: SpeculationConfig
    n: int
    labels: Labels
    priority: int
    timeout: float | None

    def requests(self, service: Service, client: Client, prompts: Sequence[list[int]]) -> list[tuple[Request, Labels]]:
        """Makes the requests, n for each prompt; a seed goes up by one with each answer of a prompt.

        The later answers of a prompt come after its first, which alone reads and scores it.
        """
        made: list[tuple[Request, Labels]] = []
        for ids in prompts:
            first: Request | None = None
            for number in range(self.n):
                params = self.params
                if number:
                    seed = None if params.seed is None else (params.seed + number) % 2**63
                    params = params.model_copy(update={"seed": seed, "prompt_logprobs": None})
                request = service.engine.prepare(
                    ids,
                    params,
                    speculation=self.speculation,
                    tenant=client.name,
                    priority=self.priority,
                    queue_timeout=service.config.queue_timeout,
                    timeout=self.timeout,
                )
                request.after = first
                first = first or request
                made.append((request, self.labels))
        return made


def tools_of(service: Service, body: ChatBody) -> Tools | None:
    """The functions that a chat offers; None where the model has no tokenizer, and so no chat.

    Raises:
        ApiError: 400 naming the field.
    """
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        return None
    try:
        return Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer)
    except ConfigError as error:
        raise api_error(error) from None


def plan(service: Service, client: Client, body: DecodeBody, tools: Tools | None = None) -> Plan:
    """Checks everything but the prompt.

    Raises:
        ApiError: 400 naming the field.
    """
    config = service.config
    n = body.n or 1
    if n > config.max_choices:
        raise invalid(f"n: at most {config.max_choices} on this server (got {n})", "n", "invalid_value")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed with stream = true", "stream_options", "invalid_value")
    labels = Labels(drafter_of(service.engine, body), client.tenant_class, _category(body))
    try:
        params = sampling(body, config)
        if tools is not None:
            params = tools.constrain(params)
    except ConfigError as error:
        raise api_error(error, rename_for(body)) from None
    priority = client.priority if body.priority is None else body.priority
    if priority < client.priority:
        message = f"priority: this key's requests may have {client.priority} or more (got {priority})"
        raise invalid(message, "priority", "invalid_value")
    limits = [limit for limit in (body.timeout, config.request_timeout) if limit is not None]
    return Plan(params, speculation(service, body), n, labels, priority, min(limits, default=None))


def sampling(body: DecodeBody, config: ServerConfig) -> SamplingParams:
    """The library's sampling parameters of a body."""
    given = {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.stop is not None:
        given["stop"] = body.stop if isinstance(body.stop, str) else tuple(body.stop)
    if body.json_schema is not None:
        given["json_schema"] = body.json_schema
    given |= structured_fields(body.response_format)
    given["temperature"] = 1.0 if body.temperature is None else body.temperature
    given["max_tokens"] = _max_tokens(body, config)
    given["logprobs"] = _logprobs(body)
    if isinstance(body, CompletionBody) and body.echo:
        given["prompt_logprobs"] = body.logprobs
    return SamplingParams(**given)


def _max_tokens(body: DecodeBody, config: ServerConfig) -> int | None:
    asked, field = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if asked is not None and asked != body.max_completion_tokens:
            raise ConfigError(f"{asked} and max_completion_tokens {body.max_completion_tokens} differ", field=field)
        asked, field = body.max_completion_tokens, "max_completion_tokens"
    limit = config.max_output_tokens
    if asked is None:
        return limit if isinstance(body, ChatBody) else min(COMPLETION_TOKENS, limit or COMPLETION_TOKENS)
    if limit is not None and asked > limit:
        raise ConfigError(f"at most {limit} on this server (got {asked})", field=field)
    return asked


def _logprobs(body: DecodeBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise ConfigError("only allowed with logprobs = true", field="top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else None
    return None


def drafter_of(engine: Engine, body: DecodeBody) -> str:
    """Name of the drafter that will serve the request; ``none`` for plain decoding."""
    names, wanted = engine.drafters, body.speculation
    served = next(iter(names), "none")
    if wanted is None:
        return served
    if wanted.drafter not in (None, *names):
        there = f"one of {', '.join(names)}" if len(names) > 1 else f"{served!r}, which is all that this server has"
        message = f"speculation.drafter: must be {there} (got {wanted.drafter!r:.80})"
        raise invalid(message, "speculation.drafter", "invalid_value")
    return "none" if wanted.off or wanted.k == 0 else wanted.drafter or served


def speculation(service: Service, body: DecodeBody) -> SpeculationConfig:
    """How the request is drafted: the engine's own settings where it does not say."""
    own, wanted = service.engine.config, body.speculation
    if wanted is None:
        return SpeculationConfig(k=own.k, max_k=own.max_k, verify=own.verify)
    if wanted.off and wanted.k not in (None, 0):
        raise invalid("speculation.k: nothing is drafted with off = true", "speculation.k", "invalid_value")
    limit = service.config.request_max_k
    for field in ("k", "max_k"):
        asked = getattr(wanted, field)
        if isinstance(asked, int) and asked > limit:
            name = f"speculation.{field}"
            raise invalid(f"{name}: at most {limit} on this server (got {asked})", name, "invalid_value")
    return SpeculationConfig(
        k=0 if wanted.off else own.k if wanted.k is None else wanted.k,
        max_k=own.max_k if wanted.max_k is None else wanted.max_k,
        verify=own.verify if wanted.verify is None else wanted.verify,
        drafter=wanted.drafter if service.engine.drafters else None,
    )


def _category(body: DecodeBody) -> str:
    category = (body.metadata or {}).get("category", "")
    if category and not _CATEGORY.fullmatch(category):
        raise invalid(
            "metadata.category: must be 1 to 32 small letters, digits, dashes or underscores",
            "metadata.category",
            "invalid_value",
        )
    return category


def prompts_of(body: CompletionBody) -> list[Any]:
    """The prompts of a completion, each a text or token ids."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def completion_prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt of a completion."""
    tokenizer = service.engine.tokenizer
    ids = []
    for one in prompts_of(body):
        if isinstance(one, str):
            if tokenizer is None:
                raise invalid("prompt: this model has no tokenizer; give token ids", "prompt", "invalid_value")
            one = tokenizer.encode(one) if one else []
        ids.append(_checked(service, one, "prompt"))
    return ids


def chat_prompt(
    service: Service, messages: Sequence[Message], generate: bool, variables: Mapping[str, Any], tools: Tools | None
) -> list[int]:
    """Token ids of a conversation by the model's template.

    Args:
        generate: End where the assistant's answer begins.
        variables: Further variables of the template.
        tools: What may be called; needed wherever there is a tokenizer.
    """
    tokenizer = service.engine.tokenizer
    if tokenizer is None or tools is None:
        raise invalid("messages: this model has no tokenizer; use /v1/completions", "messages", "invalid_value")
    if reserved := _TEMPLATE_VARIABLES.intersection(variables):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise invalid(f"{name}: is set by the server; drop it", name, "invalid_value")
    plain = [_message(service, message, i) for i, message in enumerate(messages)]
    try:
        plain, own = tools.prompt(plain)
        ids = tokenizer.chat(plain, generate, **variables, **own)
    except ConfigError as error:
        raise api_error(error) from None
    return _checked(service, ids, "messages")


def _message(service: Service, message: Message, position: int) -> dict[str, Any]:
    """One message as templates know it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    field = f"messages.{position}"
    if content is None and message.tool_calls is None:
        raise invalid(f"{field}.content: is missing", f"{field}.content", "invalid_value")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) is not None and message.role != role:
            raise invalid(f"{field}.{name}: only for messages of role {role}", f"{field}.{name}", "invalid_value")
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls is not None:
        plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if service.config.control_tokens == "refuse":
        for name, value in plain.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""
            _no_control_tokens(service, text, f"{field}.{name}")
    return plain


def _no_control_tokens(service: Service, text: str, field: str) -> None:
    tokenizer = service.engine.tokenizer
    assert tokenizer is not None
    token = next((t for t in tokenizer.encode(text, special=False) if tokenizer.is_special(t)), None)
    if token is not None:
        name = tokenizer.decode([token], skip_special=False)
        raise invalid(f"{field}: holds the model's control token {name!r}", field, "control_token")


def _checked(service: Service, ids: list[int], field: str) -> list[int]:
    limit = service.config.max_prompt_tokens
    if limit is not None and len(ids) > limit:
        message = f"{field}: has {len(ids)} tokens, this server takes {limit}"
        raise invalid(message, field, "context_length_exceeded")
    return ids


def refuse_completion_fields(body: CompletionBody) -> None:
    """Combinations of a completion's own fields that cannot be honoured."""
    if body.best_of not in (None, body.n or 1):
        raise invalid("best_of: must equal n; all answers are returned", "best_of", "unsupported_value")


def rename_for(body: DecodeBody) -> dict[str, str]:
    """Names in this body of fields that the library calls otherwise."""
    names = {"prompt": "messages"} if isinstance(body, ChatBody) else {}
    if body.response_format is not None:
        names |= {"json_schema": "response_format", "json_object": "response_format"}
    return names
