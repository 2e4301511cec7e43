"""What the operator of a server decides: one field is one option of ``foredraft serve``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foredraft.config import Schema
from foredraft.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class NetworkOptions(Schema):
    """Where the server listens and under which name it serves its model."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface (set API keys then)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    served_name: str | None = None
    """The model's name in the API; without it the target's own name."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain; turns HTTPS on, together with tls_key."""
    tls_key: str | None = None
    """PEM file with the certificate's private key."""
    drain_timeout: Positive = 60.0
    """Seconds that running requests have to finish after SIGTERM."""


class LimitOptions(Schema):
    """What clients may ask for, and how much of it."""

    max_queue: Annotated[int, Field(ge=0)] = 128
    """Most requests that wait for a slot; more are answered 429."""
    queue_timeout: Positive | None = 60.0
    """Seconds that a request may wait for a slot before it is answered 503."""
    request_timeout: Positive | None = 600.0
    """Seconds that a request may take in all; clients may ask for less with the field timeout."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Longest request body; longer ones are answered 413."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt; without it the model's context is the limit."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most that max_tokens may be, and what it is where a chat does not say; without it the model's context is the
    limit."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16
    """Most answers of one HTTP request: prompts times n."""
    stream_buffer: Annotated[int, Field(ge=1)] = 4096
    """Tokens that may wait for a reader too slow for its stream; then the request is cancelled."""
    stall_timeout: Positive = 60.0
    """Seconds in which a reader must take something of what waits for it."""
    stream_smoothing: Annotated[int, Field(ge=0, le=256)] = 0
    """Tokens of every chunk of a stream, so that chunk sizes do not show acceptance; 0 sends what each step wrote."""
    stream_padding: Annotated[int, Field(ge=0, le=65536)] = 0
    """Fill events of streams to multiples of this many bytes, so that they do not show lengths of words; 0 fills
    nothing."""
    request_max_k: Annotated[int, Field(ge=0, le=128)] = 16
    """Most drafted tokens a step that a request may ask for."""
    control_tokens: Literal["refuse", "allow"] = "refuse"
    """Whether chat messages may hold the model's control tokens as text, with which they could pose as the system."""


class AccessOptions(Schema):
    """Who may use the server, and what is written down about it."""

    api_keys: str | None = None
    """TOML file of hashed API keys; the variable FOREDRAFT_API_KEYS holds keys as text. Without either, no key is
    needed."""
    key_requests: Annotated[int, Field(ge=1)] | None = None
    """Most requests of one key at once, where its entry in the file does not say."""
    key_tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Tokens a minute of one key, prompt and output, where its entry in the file does not say."""
    public_stats: bool = False
    """Serve /metrics and /stats to anybody even where API keys are set; else they need a key with admin = true."""
    log_prompts: bool = False
    """Write prompts and outputs into the log; without it the log holds no text of any client."""


class ServerConfig(NetworkOptions, LimitOptions, AccessOptions):
    """Everything that the server itself is configured with; the engine's options are apart."""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise ConfigError("TLS needs both a certificate and its key", field=missing, remedy="give both files")
        return self
