"""The library's front door: give it a target and a drafter, ask for text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from foredraft.config import EngineConfig, SamplingParams, SpeculationConfig
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.drafters.choice import assemble, names
from foredraft.engine.admission import Admission
from foredraft.engine.controller import Controller
from foredraft.engine.guard import Guard
from foredraft.engine.loop import Loop, StepTimes
from foredraft.engine.request import Request
from foredraft.engine.result import Result, StreamDelta
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.stats import SpecStats
from foredraft.engine.watch import Watch
from foredraft.errors import ConfigError, RequestFailedError
from foredraft.kernels import Activations
from foredraft.models.base import Target
from foredraft.models.loading import DtypeName, LoadedModel, load_model

if TYPE_CHECKING:
    from foredraft.models.hf_devices import DeviceMap

log = logging.getLogger("foredraft")

DEFAULT_TARGET = "smollm2-135m"

Prompt: TypeAlias = str | Sequence[int]


class Engine:
    """Decodes requests with speculation; the law of the output is the target's alone.

    Args:
        target: Name, folder, ``.gguf`` file or hub id of the model; or a model object.
        drafter: ``"NAME"`` or ``"NAME:ARGUMENT"`` of a registered drafter, a drafter object, or None for plain
            decoding. Several, as a list or as a mapping from names of your own, let each request choose
            (``SpeculationConfig.drafter``); the first is the default.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``float64`` or ``auto``.
        device: ``cpu``, ``cuda``, … or ``auto``.
        max_context: Most tokens of one request; None takes the model's own limit.
        cache_bytes: Budget of the KV cache in bytes; None takes a share of free memory.
        activations: ``float32``, or ``int16`` or ``int8`` to round what enters products with quantised weights on a
            CPU: faster, and another target by a little (see docs/kernels.md).
        trust_remote_code: Let transformers run code that comes with a model.
        tensor_parallel: Split the target over so many processes (see docs/multi-device.md).
        device_map: Distribute the target's layers over several devices, by transformers (see there, too).
        clock: Monotonic seconds, for tests.
        options: Fields of :class:`~foredraft.config.EngineConfig`: ``k``, ``max_k``, ``verify``, ``max_batch``, …

    Raises:
        ConfigError, ModelLoadError, VocabularyMismatchError: Named after what cannot be honoured.

    Example:
        >>> from foredraft.testing import ScriptedDrafter, TableModel
        >>> count = TableModel(lambda prefix: [float(i == (prefix[-1] + 1) % 5) for i in range(5)], vocab_size=5)
        >>> guess = ScriptedDrafter(lambda prefix, k: [(prefix[-1] + 1 + i) % 5 for i in range(k)])
        >>> Engine(target=count, drafter=guess, k=3).generate([[0]], SamplingParams(max_tokens=6))[0].token_ids
        [1, 2, 3, 4, 0, 1]
    """

    def __init__(
        self,
        target: str | Path | LoadedModel | Target = DEFAULT_TARGET,
        drafter: str | Drafter | Sequence[str | Drafter] | Mapping[str, str | Drafter] | None = None,
        *,
        dtype: DtypeName = "auto",
        device: str = "auto",
        max_context: int | None = None,
        cache_bytes: int | None = None,
        activations: Activations = "float32",
        trust_remote_code: bool = False,
        tensor_parallel: int = 1,
        device_map: DeviceMap | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(**options)
        started = time.perf_counter()
        if isinstance(target, str | Path):
            target = load_model(
                target,
                dtype=dtype,
                device=device,
                max_context=max_context,
                cache_bytes=cache_bytes,
                activations=activations,
                trust_remote_code=trust_remote_code,
                tensor_parallel=tensor_parallel,
                device_map=device_map,
            )
        elif tensor_parallel != 1 or device_map is not None:
            field = "device_map" if tensor_parallel == 1 else "tensor_parallel"
            raise ConfigError("the target is loaded already", field=field, remedy="give it to load_model")
        loaded = target if isinstance(target, LoadedModel) else None
        self.target: Target = loaded.target if loaded else target  # type: ignore[assignment]
        self.tokenizer = loaded.tokenizer if loaded else None
        self.target_info = loaded.info if loaded else None
        if not isinstance(self.target, Target):
            raise ConfigError(f"{self.target!r} is no model", field="target", remedy="give a name, a path or a Target")
        context = DrafterContext(self.target, self.tokenizer, dtype, device, max_context, self.config.max_batch)
        self.drafter = assemble(drafter, context)
        self.drafters = names(self.drafter)
        self.load_s = time.perf_counter() - started
        self.clock = clock
        self.controller = Controller(getattr(self.target, "pass_prior", None))
        self.watch = Watch(self.controller)
        self.guard = Guard(self.config, self.controller)
        loop = Loop(self.target, self.drafter, self.controller, self.config.max_step_tokens, clock, self.guard)
        keep = self.config.max_batch if self.config.prefix_reuse else 0
        self.stats = SpecStats()
        self.scheduler = Scheduler(loop, self.config.max_batch, keep, clock, self.stats)
        self._admission = Admission(self.target, self.tokenizer, self.config, clock, self.drafters)

    # --- whole requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationConfig | Sequence[SpeculationConfig] | None = None,
        tenant: str = "",
        raise_errors: bool = True,
    ) -> list[Result]:
        """Decodes all prompts together and returns one result each, in order.

        Args:
            prompts: One prompt or many; a prompt is text or a list of token ids.
            params: One for all, or one a prompt; None is greedy decoding to the end of the text.
            speculation: Overrides the engine's ``k``, ``max_k`` and ``verify``, for all or each.
            tenant: Whose requests these are; nothing is shared across tenants.
            raise_errors: Raise if a request fails on the way (after the others have finished); else its result
                carries ``error``.

        Raises:
            ConfigError, ContextLengthError: A prompt or option cannot be honoured; nothing was started.
            RequestFailedError: A request failed on the way; ``.results`` holds them all.
        """
        batch = _as_batch(prompts)
        requests = [
            self._admission.prepare(prompt, p, s, tenant)
            for prompt, p, s in zip(
                batch,
                _spread(params, len(batch), "params"),
                _spread(speculation, len(batch), "speculation"),
                strict=True,
            )
        ]
        for request in requests:
            self.scheduler.add(request)
        try:
            for request in requests:
                while request.finished_at is None:
                    self.step()
        except BaseException:  # an interrupt must not leave them running
            for request in requests:
                self.cancel(request)
            self.scheduler.reap()
            raise
        results = [request.result(self.load_s) for request in requests]
        failed = [result for result in results if result.error is not None]
        if failed and raise_errors:
            raise RequestFailedError(
                f"{len(failed)} of {len(results)} requests failed; the first: {failed[0].error}", results=results
            )
        return results

    # --- streams

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationConfig | None = None,
        tenant: str = "",
    ) -> Iterator[StreamDelta]:
        """Decodes one prompt and yields what each step adds; the last delta carries the result.

        The request is queued when the first delta is asked for; several streams, read in any order, are decoded
        together. Closing the iterator cancels the request and frees its slot.

        Raises:
            ConfigError, ContextLengthError: At the call, before anything is started.
            ForedraftError: The request failed on the way.
        """
        return self._follow(self._admission.prepare(prompt, params, speculation, tenant))

    def _follow(self, request: Request) -> Iterator[StreamDelta]:
        sent, done = 0, False
        request.submitted_at = self.clock()
        self.scheduler.add(request)
        try:
            while not done:
                if request.finished_at is None:  # else somebody else's steps have finished it
                    self.step()
                tokens, request.events = request.events, []
                text, sent = request.stream.text[sent:], len(request.stream.text)
                done = request.finished_at is not None
                if done and request.error is not None:
                    raise request.error
                if tokens or text or done:
                    yield StreamDelta(text, tokens, request.result(self.load_s) if done else None)
        finally:
            if request.finished_at is None:
                self.cancel(request)
                self.scheduler.reap()

    # --- step by step, for servers

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationConfig | None = None,
        tenant: str = "",
    ) -> Request:
        """Queues one request; :meth:`step` moves it on, ``request.result`` is there once it is finished."""
        request = self.prepare(prompt, params, speculation=speculation, tenant=tenant)
        self.add(request)
        return request

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationConfig | None = None,
        tenant: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Request:
        """Checks one request without queueing it; unlike everything else here it may be called in any thread.

        Args:
            prompt: Text or token ids.
            params: How tokens are drawn; None is greedy.
            speculation: Overrides the engine's ``k``, ``max_k`` and ``verify``.
            tenant: Whose request this is.
            priority: Requests of a lower number get a slot first.
            queue_timeout: Seconds from now after which it fails if it still has no slot.
            timeout: Seconds from now after which it fails unless it has finished.

        Raises:
            ConfigError, ContextLengthError: The prompt or an option cannot be honoured.
        """
        request = self._admission.prepare(prompt, params, speculation, tenant)
        request.priority = priority
        if queue_timeout is not None:
            request.admit_by = request.submitted_at + queue_timeout
        if timeout is not None:
            request.deadline = request.submitted_at + timeout
        return request

    def add(self, request: Request) -> None:
        """Queues a request that :meth:`prepare` made."""
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has written; its slot is free after the next step."""
        self.scheduler.cancel(request)

    def step(self) -> StepTimes | None:
        """Admits what fits and runs one step of everything admitted; None if there was nothing to do."""
        before = {id(r): (r, r.written, r.plain_steps) for r in self.scheduler.active}
        times = self.scheduler.step()
        if times is not None and self.drafter is not None:
            seen = list(before.values())
            tokens = sum(r.written - written for r, written, _ in seen)
            declined = sum(r.plain_steps - plain for r, _, plain in seen)
            if times.drafted or declined:  # else nobody had a choice: k=0 was asked for, or the text is at its end
                self.watch.record(times, tokens, max(len(seen), 1), bool(seen) and declined == len(seen))
        return times

    @property
    def speculation_pays(self) -> bool | None:
        """Whether drafting pays at present, by measured time; None before enough steps were seen."""
        return self.watch.pays

    def reset(self) -> None:
        """Forgets idle prefixes and what the drafter kept of ended requests, so that the next request starts cold."""
        self.scheduler.pool.clear()
        if self.drafter is not None:
            self.drafter.reset()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes):
        return [prompts]
    try:
        batch = list(prompts)
    except TypeError:
        raise ConfigError(f"must be prompts, not {type(prompts).__name__}", field="prompts") from None
    if batch and all(isinstance(item, Integral) or getattr(item, "ndim", None) == 0 for item in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def _spread(value: Any, n: int, field: str) -> list[Any]:
    """One value for all, or one each."""
    if value is None or isinstance(value, SamplingParams | SpeculationConfig):
        return [value] * n
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise ConfigError(f"must not be {type(value).__name__}", field=field, remedy="give one object, or one a prompt")
    values = list(value)
    if len(values) != n:
        raise ConfigError(f"has {len(values)} entries for {n} prompts", field=field, remedy="give one, or one a prompt")
    return values
