"""Our options as the command line of vLLM's server; what vLLM cannot honour is refused, never dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ConfigError
from foredraft.scaleout.options import ScaleOptions
from foredraft.scaleout.speculation import Model, Speculation, find_model, translate
from foredraft.server.config import ServerConfig
from foredraft.server.keys import ENVIRONMENT, load_keys

ONE_TO_ONE = {
    "dtype": "--dtype",
    "max_context": "--max-model-len",
    "cache_bytes": "--kv-cache-memory-bytes",
    "max_batch": "--max-num-seqs",
    "max_step_tokens": "--max-num-batched-tokens",
    "tls_certificate": "--ssl-certfile",
    "tls_key": "--ssl-keyfile",
}
"""Options whose value vLLM takes as it is, handed on where the user gave them."""

OF_OUR_OWN = ("host", "port", "served_name", "drain_timeout", "k", "verify", *ScaleOptions.model_fields)
"""Options that are translated one by one."""

SWITCHES = {
    "prefix_reuse": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    "trust_remote_code": ("--trust-remote-code", ""),
}

_PROXY = "drop it, or put a proxy that does it before vLLM"
_DROP = "drop it"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "max_k": (None, "vLLM drafts the same number of tokens in every step", "use --k"),
    "guard": (False, "vLLM cannot stop drafting for one request or tenant", _DROP),
    "guard_rate": ("auto", "vLLM has no guard", _DROP),
    "guard_false_alarm": (None, "vLLM has no guard", _DROP),
    "guard_request_waste": (None, "vLLM has no guard", _DROP),
    "guard_tenant_waste": (None, "vLLM has no guard", _DROP),
    "device": ("auto", "vLLM's build decides where it runs", "choose the build with --vllm-python"),
    "device_map": (None, "vLLM places the model itself", "use --tensor-parallel or --pipeline-parallel"),
    "activations": ("float32", "vLLM does not round inputs of products", _DROP),
    "max_queue": (None, "vLLM's queue has no limit", _PROXY),
    "queue_timeout": (None, "vLLM's queue has no time limit", _PROXY),
    "request_timeout": (None, "vLLM has no time limit of requests", _PROXY),
    "max_body_bytes": (None, "vLLM has no limit of bodies", _PROXY),
    "max_prompt_tokens": (None, "vLLM limits prompts by its context only", "use --max-context"),
    "max_output_tokens": (None, "vLLM shortens longer requests without a word", "use --max-context"),
    "max_choices": (None, "vLLM has no limit of choices", _PROXY),
    "stream_buffer": (None, "vLLM does not bound what waits for a slow reader", _PROXY),
    "stall_timeout": (None, "vLLM does not end streams that nobody reads", _PROXY),
    "stream_smoothing": (
        0,
        "vLLM sends what each step wrote",
        "drop it, and serve without --engine vllm if you need it",
    ),
    "stream_padding": (0, "vLLM does not fill its events", "drop it, and serve without --engine vllm if you need it"),
    "request_max_k": (None, "vLLM's requests cannot choose a draft length", _DROP),
    "control_tokens": ("allow", "vLLM reads control tokens in messages", "drop it, or check messages before vLLM"),
    "api_keys": (None, "the file holds hashes, and vLLM compares the keys", f"put one key into {ENVIRONMENT}"),
    "key_requests": (None, "vLLM knows no tenants", _PROXY),
    "key_tokens_per_minute": (None, "vLLM knows no tenants", _PROXY),
    "public_stats": (True, "vLLM shows /metrics to anybody", "let a proxy hide /metrics"),
    "log_prompts": (False, "vLLM logs prompts in debug mode only", "set VLLM_LOGGING_LEVEL=DEBUG and log requests"),
}
"""Option -> the value with which it asks nothing of vLLM; why vLLM cannot honour others; what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """vLLM's server, not yet started.

    Attributes:
        model: Folder or hub id.
        arguments: After the model.
        secrets: Environment variables that must not be shown.
        notes: What differs from ``foredraft serve`` itself, a sentence each.
        modules: Python modules that must be there besides vLLM.
        name: The model's name in the API.
        url: Where it will listen.
        drafter: As the user wrote it; None decodes plainly.
    """

    model: str
    arguments: tuple[str, ...]
    secrets: Mapping[str, str]
    notes: tuple[str, ...]
    modules: tuple[str, ...]
    name: str
    url: str
    drafter: str | None


def launch(
    target: str,
    drafter: str | None,
    given: Mapping[str, Any],
    scale: ScaleOptions,
    environment: Mapping[str, str],
) -> Launch:
    """Translates everything at once.

    Args:
        target: ``--target``.
        drafter: ``--drafter``; None decodes plainly.
        given: The server's, engine's and loading options that the user gave, parsed, by field name.
        scale: Sizes of the cluster.
        environment: Where keys are looked for, as text.

    Raises:
        ConfigError: vLLM cannot honour an option; the message names it and says what to do.
    """
    refuse(given)
    model = find_model(target, "target")
    speculation = _speculation(drafter, given, model)
    network = ServerConfig(
        **{field: given[field] for field in ServerConfig.model_fields if field in given and field not in REFUSED}
    )
    arguments = ["--host", network.host, "--port", str(network.port)]
    name = network.served_name or (model.name.rsplit("/", 1)[-1] if model.config else model.name)
    arguments += ["--served-model-name", name, "--shutdown-timeout", str(math.ceil(network.drain_timeout))]
    # Without it vLLM takes defaults of sampling fields from the model's folder; here they are OpenAI's.
    arguments += ["--generation-config", "vllm"]
    for field, flag in ONE_TO_ONE.items():
        if given.get(field) is not None:
            arguments += [flag, str(given[field])]
    for field, (on, off) in SWITCHES.items():
        if field in given and (flag := on if given[field] else off):
            arguments.append(flag)
    arguments += _parallel(scale)
    if speculation is not None:
        arguments += ["--speculative-config", json.dumps(speculation.config)]
    secrets = _secrets(network, environment)
    notes = list(speculation.notes if speculation else ())
    if secrets:
        notes.append("vLLM asks for the key under /v1 only; /metrics and its other routes are open")
    modules = (*(speculation.modules if speculation else ()), *(["ray"] if scale.distributed_backend == "ray" else []))
    scheme = "https" if network.tls_certificate else "http"
    host = f"[{network.host}]" if ":" in network.host else network.host
    return Launch(
        model=model.name,
        arguments=(*arguments, *_handed_on(scale.vllm_arg, arguments)),
        secrets=secrets,
        notes=tuple(notes),
        modules=tuple(modules),
        name=name,
        url=f"{scheme}://{host}:{network.port}",
        drafter=drafter if speculation else None,
    )


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first option that asks for what vLLM has not."""
    for field, value in given.items():
        if field not in (*OF_OUR_OWN, *ONE_TO_ONE, *SWITCHES, *REFUSED):
            raise ConfigError("is not translated for vLLM", field=field, remedy=_DROP)
        if field in REFUSED:
            harmless, problem, remedy = REFUSED[field]
            if value is not None and value != harmless:
                raise ConfigError(problem, field=field, remedy=remedy)
    if given.get("k") == "auto":
        raise ConfigError(
            "vLLM has no automatic draft length", field="k", remedy="give a number, or leave it to the head's own"
        )
    if given.get("verify") == "coupled":
        raise ConfigError(
            "vLLM has no coupled rule, so a seed does not give one text", field="verify", remedy="use auto or rejection"
        )
    if given.get("verify") == "block":
        raise ConfigError(
            "some of vLLM's builds verify by blocks and others ignore it without a word",
            field="verify",
            remedy="use auto or rejection",
        )
    if given.get("dtype") == "float64":
        raise ConfigError("vLLM does not compute in float64", field="dtype", remedy="use float32")


def _speculation(drafter: str | None, given: Mapping[str, Any], model: Model) -> Speculation | None:
    if drafter is None or given.get("k") == 0:
        return None
    found = translate(drafter, given.get("k"), model)
    if given.get("verify") == "rejection" and "model" in found.config:
        # Drafts drawn from q and verified against it; vLLM's default verifies the drafter's likeliest token.
        found.config["draft_sample_method"] = "probabilistic"
        found.config["rejection_sample_method"] = "standard"
    return found


def _parallel(scale: ScaleOptions) -> list[str]:
    arguments = []
    for size, flag in (
        (scale.tensor_parallel, "--tensor-parallel-size"),
        (scale.pipeline_parallel, "--pipeline-parallel-size"),
        (scale.data_parallel, "--data-parallel-size"),
    ):
        if size > 1:
            arguments += [flag, str(size)]
    if scale.distributed_backend is not None:
        arguments += ["--distributed-executor-backend", scale.distributed_backend]
        if scale.data_parallel > 1:
            arguments += ["--data-parallel-backend", scale.distributed_backend]
    return arguments


_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_OURS = {
    "--model": "--target",
    "--speculative-config": "--drafter",
    "--tensor-parallel-size": "--tensor-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "--data-parallel-size": "--data-parallel",
    "--distributed-executor-backend": "--distributed-backend",
    "--api-key": ENVIRONMENT,
}


def _handed_on(extra: tuple[str, ...], ours: list[str]) -> tuple[str, ...]:
    """The user's own arguments; vLLM would take the last of two, so none may say again what an option of ours says."""
    for argument in extra:
        flag = argument.partition("=")[0].replace("_", "-")
        flag = _SHORT.get(flag, flag)
        if flag.startswith("-") and (flag in ours or flag in _OURS):
            raise ConfigError(
                f"{flag} is set by an option of its own",
                field="vllm_arg",
                remedy=f"use {_OURS[flag]}" if flag in _OURS else "drop it, and use that option",
            )
    return extra


def _secrets(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The key that vLLM asks for."""
    entries = [entry.strip() for entry in environment.get(ENVIRONMENT, "").split(",") if entry.strip()]
    if not entries:
        return {}
    load_keys(config)  # its complaints about names and lengths
    if len(entries) > 1:
        raise ConfigError(
            f"vLLM tells no tenants apart and takes one key here (got {len(entries)})",
            field=ENVIRONMENT,
            remedy="leave one, or put a proxy that knows the keys before vLLM",
        )
    name, mark, key = entries[0].partition("=")
    return {"VLLM_API_KEY": key if mark else name}
