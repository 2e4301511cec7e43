"""Runs one request body to its answer: a whole response, or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from foredraft.engine.request import Request
from foredraft.errors import ForedraftError
from foredraft.server import smoothing, sse
from foredraft.server.bodies import DecodeBody
from foredraft.server.convert import Plan, rename_for
from foredraft.server.errors import ApiError, api_error, invalid
from foredraft.server.gate import Visit
from foredraft.server.pieces import Piece
from foredraft.server.replies import Reply
from foredraft.server.runner import Labels
from foredraft.server.service import Job, Service

Prepare = Callable[[], Sequence[tuple[Request, Labels]]]


async def answer(
    service: Service,
    http: HttpRequest,
    body: DecodeBody,
    plan: Plan,
    prompts: int,
    prepare: Callable[[], list[list[int]]],
    reply: Reply,
) -> Response:
    """Decodes and answers.

    Args:
        plan: What the body asks for.
        prompts: How many prompts it has.
        prepare: Token ids of the prompts; runs aside.

    Raises:
        ApiError: Before the first byte; later a stream ends with an event that holds the error.
    """
    visit: Visit = http.scope["state"]["visit"]
    answers = prompts * plan.n
    if answers > service.config.max_choices:
        raise invalid(f"n: {answers} answers are more than {service.config.max_choices} on this server", "n")
    if body.speculation is not None and body.speculation.stats == "detailed" and answers > 1:
        raise invalid("speculation.stats: 'detailed' is for one answer; use 'summary'", "speculation.stats")

    def make() -> list[tuple[Request, Labels]]:
        try:
            made = plan.requests(service, visit.client, prepare())
        except ForedraftError as error:
            raise api_error(error, rename_for(body)) from None
        for request, _ in made:  # so that the engine's log names the HTTP request; clients may repeat their ids
            request.id += f"/{visit.id}"
        return made

    stack = contextlib.AsyncExitStack()
    job = await stack.enter_async_context(service.job(visit.client, answers, make, streamed=bool(body.stream)))
    if body.stream:
        events = smoothing.padded(
            _events(job, reply, visit, body, service.config.stream_smoothing), service.config.stream_padding
        )
        return sse.EventStream(events, stack.aclose, service.config.stall_timeout)
    async with stack:
        return await _whole(http, job, reply, visit, body)


async def _whole(http: HttpRequest, job: Job, reply: Reply, visit: Visit, body: DecodeBody) -> Response:
    """The response in one piece; given up if the client goes away first."""
    gather = asyncio.create_task(_gather(job))
    listener = asyncio.create_task(sse.gone(http.receive))
    try:
        await asyncio.wait({gather, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not gather.done():
            visit.outcome = "disconnected"
            return Response(status_code=499)
        pieces = gather.result()
    finally:
        for task in (gather, listener):
            task.cancel()
        await asyncio.gather(gather, listener, return_exceptions=True)
    visit.finished(pieces)
    for piece in pieces:
        _raise_failure(piece, body)
    return JSONResponse(reply.complete(pieces))


async def _gather(job: Job) -> list[Piece]:
    """Everything, one piece an answer."""
    pieces = [Piece() for _ in job.requests]
    async for choice, piece in job.pieces():
        pieces[choice].extend(piece)
    return pieces


async def _events(job: Job, reply: Reply, visit: Visit, body: DecodeBody, tokens: int) -> AsyncGenerator[bytes, None]:
    """The events of a stream, the last of them ``[DONE]``; each holds ``tokens`` tokens, or with 0 what there is."""
    whole = [Piece() for _ in job.requests]
    opened: set[int] = set()
    visit.outcome = "disconnected"  # unless the end is reached
    try:
        for choice in range(len(whole)):
            if (opening := reply.opening(choice)) is not None:
                yield sse.event(opening)
        async with contextlib.aclosing(smoothing.smooth(job.pieces(), tokens)) as pieces:
            async for choice, piece in pieces:
                visit.first_piece()
                whole[choice].extend(piece)
                _raise_failure(piece, body)
                if reply.scored and choice not in opened:
                    opened.add(choice)
                    request = job.requests[choice]
                    yield sse.event(reply.scored_opening(choice, request.after or request))
                yield sse.event(reply.chunk(choice, piece))
        if reply.has_last_chunk:
            yield sse.event(reply.envelope([], [piece.result for piece in whole if piece.result is not None]))
        visit.outcome = ""
    except ApiError as error:
        visit.failed(error)
        yield sse.event(error.body(visit.id))
    finally:
        visit.finished(whole)
    yield sse.DONE


def _raise_failure(piece: Piece, body: DecodeBody) -> None:
    if piece.result is None:
        return
    if piece.result.error is not None:
        raise api_error(piece.result.error, rename_for(body))
    if piece.result.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
