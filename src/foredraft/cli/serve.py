"""``foredraft serve``: an OpenAI-compatible server; ``foredraft new-key``: a key for it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foredraft.cli import serve_vllm, session
from foredraft.cli.console import stderr
from foredraft.cli.options import Given, build, schema_options
from foredraft.config import Schema
from foredraft.errors import ConfigError
from foredraft.scaleout.options import ScaleOptions
from foredraft.server.config import AccessOptions, LimitOptions, NetworkOptions, ServerConfig

PANELS: dict[str, type[Schema]] = {
    "Network": NetworkOptions,
    "Limits": LimitOptions,
    "Access": AccessOptions,
    **session.PANELS,
    "Cluster": ScaleOptions,
}


DEFAULTS = {"guard": True}
"""Where a server, which many share, differs from a library."""


@schema_options(PANELS, DEFAULTS)
def serve(
    target: session.TargetOption = session.DEFAULT_TARGET,
    drafter: session.DraftersOption = None,
    plain: session.PlainOption = False,
    *,
    given: Given,
) -> None:
    """Serve the model over HTTP with OpenAI's API: completions and chats, streamed or whole."""
    chosen = session.chosen_drafters(drafter or [], plain, given)
    if (scale := build(ScaleOptions, given)).engine == "vllm":
        if len(chosen) > 1:
            raise ConfigError("vLLM drafts with one for all requests", field="drafter", remedy="give it once")
        serve_vllm.serve(target, next(iter(chosen), None), given, scale)
        return
    serve_vllm.only_vllm(given)
    given = {**DEFAULTS, **given}
    config = build(ServerConfig, given)
    build(session.EngineOptions, given)
    try:
        from foredraft.server import app, keys, logs, main
    except ImportError as problem:
        raise ConfigError(
            f"the server's packages are missing ({problem.name})",
            remedy="install them: pip install 'foredraft[server]'",
        ) from None
    keys.load_keys(config)  # judged before a model is loaded
    engine = session.open_engine(target, chosen if len(chosen) > 1 else next(iter(chosen), None), given)
    name = config.served_name or _name(target, engine.target_info)
    application = app.build(engine, config.model_copy(update={"served_name": name}))
    logs.configure()

    def started(url: str) -> None:
        with_drafter = f" with drafter{'s' * (len(chosen) > 1)} {', '.join(chosen)}" if chosen else ""
        keyless = "" if not application.service.keys.open else "; no API key needed"
        stderr().print(f"serving {name}{with_drafter} on {url}/v1{keyless}", soft_wrap=True)

    main.serve(application, started)


def _name(target: str, info: object) -> str:
    """The model's name in the API: as the operator wrote it, unless that is a path."""
    from foredraft.models.catalog import find

    if find(target) is not None:
        return target
    return str(getattr(info, "name", "model"))


def new_key(
    name: Annotated[str, typer.Argument(help="Whose key it is: the tenant's name.")],
) -> None:
    """Make an API key: the key on stdout, once, and its entry for the key file on stderr."""
    from foredraft.server import keys

    key, entry = keys.new_key(name)
    sys.stdout.write(key + "\n")
    sys.stderr.write(entry)
