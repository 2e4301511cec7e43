"""The routes of OpenAI's API, and tokenizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from foredraft import __version__
from foredraft.errors import ForedraftError
from foredraft.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from foredraft.server.convert import (
    chat_prompt,
    completion_prompts,
    plan,
    prompts_of,
    refuse_completion_fields,
    tools_of,
)
from foredraft.server.decode import answer
from foredraft.server.errors import ApiError, api_error, invalid
from foredraft.server.gate import Visit
from foredraft.server.logprobs import TokenTexts
from foredraft.server.replies import ChatReply, Reply
from foredraft.server.service import Service

FINGERPRINT = f"foredraft-{__version__}"


def api_routes(service: Service) -> APIRouter:
    """Everything that clients of a model use."""
    router = APIRouter()
    texts = TokenTexts(service.engine.tokenizer)
    _decoding_routes(router, service, texts)
    _model_routes(router, service)
    _token_routes(router, service, texts)
    return router


def _decoding_routes(router: APIRouter, service: Service, texts: TokenTexts) -> None:
    @router.post("/v1/completions", summary="Continue prompts", tags=["decoding"])
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        visit = _visit(http)
        _check_model(service, body.model)
        refuse_completion_fields(body)
        prompts = prompts_of(body)
        _note_text(visit, prompts)
        reply = Reply(body, service.name, texts, FINGERPRINT)
        if body.echo:
            reply.echoes = [_shown(service, prompt) for prompt in prompts for _ in range(body.n or 1)]
        return await answer(
            service,
            http,
            body,
            plan(service, visit.client, body),
            len(prompts),
            lambda: completion_prompts(service, body),
            reply,
        )

    @router.post("/v1/chat/completions", summary="Answer a conversation", tags=["decoding"])
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        visit = _visit(http)
        _check_model(service, body.model)
        _note_text(visit, [message.model_dump() for message in body.messages])
        variables = body.chat_template_kwargs or {}
        tools = tools_of(service, body)
        return await answer(
            service,
            http,
            body,
            plan(service, visit.client, body, tools),
            1,
            lambda: [chat_prompt(service, body.messages, True, variables, tools)],
            ChatReply(body, service.name, texts, FINGERPRINT, tools),
        )

    @router.post("/v1/embeddings", summary="Refused: the model writes text", tags=["decoding"])
    async def embeddings() -> Response:
        raise ApiError(404, "this server decodes text and computes no embeddings", code="unsupported")


def _model_routes(router: APIRouter, service: Service) -> None:
    info = service.engine.target_info
    entry = {
        "id": service.name,
        "object": "model",
        "created": int(service.started_at),
        "owned_by": "foredraft",
        "root": service.name,
        "max_model_len": service.engine.target.max_context,
        "licence": info.licence if info is not None else None,
    }

    @router.get("/v1/models", summary="The model that is served", tags=["models"])
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    @router.get("/v1/models/{model:path}", summary="One model by name", tags=["models"])
    async def model(model: str) -> Response:
        _check_model(service, model)
        return JSONResponse(entry)


def _token_routes(router: APIRouter, service: Service, texts: TokenTexts) -> None:
    @router.post("/tokenize", summary="Text to token ids", tags=["tokens"])
    async def tokenize(body: TokenizeBody) -> Response:
        _check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt: give either a prompt or messages", "prompt")
        ids = await service.aside(lambda: _refusing(lambda: _token_ids(service, body)))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.target.max_context, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [texts.text(token) for token in ids]
        return JSONResponse(found)

    @router.post("/detokenize", summary="Token ids to text", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Response:
        _check_model(service, body.model)
        tokenizer = service.engine.tokenizer
        if tokenizer is None:
            raise invalid("tokens: this model has no tokenizer", "tokens")
        vocab = tokenizer.vocab_size
        if (wrong := next((token for token in body.tokens if token >= vocab), None)) is not None:
            raise invalid(f"tokens: token id {wrong} is outside 0…{vocab - 1}", "tokens", "invalid_value")
        return JSONResponse({"prompt": await service.aside(lambda: tokenizer.decode(body.tokens, skip_special=False))})


def _token_ids(service: Service, body: TokenizeBody) -> list[int]:
    tokenizer = service.engine.tokenizer
    if body.messages is not None:
        tools = tools_of(service, ChatBody(messages=body.messages))
        return chat_prompt(service, body.messages, body.add_generation_prompt, {}, tools)
    if tokenizer is None:
        raise invalid("prompt: this model has no tokenizer", "prompt")
    return tokenizer.encode(body.prompt or "", special=body.add_special_tokens)


def _shown(service: Service, prompt: str | list[int]) -> str:
    """A prompt as text, to be echoed."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = service.engine.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special=False)


def _refusing(function: Callable[[], list[int]]) -> list[int]:
    """Our errors as answers."""
    try:
        return function()
    except ForedraftError as error:
        raise api_error(error) from None


def _check_model(service: Service, model: str | None) -> None:
    """Names are compared, never looked up: a client cannot make the server open a file."""
    if model not in (None, service.name):
        message = f"model: {model!r:.120} is not served here; this server has {service.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _visit(http: HttpRequest) -> Visit:
    visit: Visit = http.scope["state"]["visit"]
    return visit


def _note_text(visit: Visit, prompt: Any) -> None:
    if visit.log_text:
        visit.facts["prompt"] = prompt
