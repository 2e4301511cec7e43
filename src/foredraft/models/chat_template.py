"""Chat templates: Jinja, sandboxed, bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foredraft.errors import ConfigError, ModelLoadError

_LONGEST = 16 * 2**20
"""Most characters that a template may write."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source as models carry it.
        tokens: Special tokens by role (``bos_token``, ``eos_token``, …).

    Attributes:
        variables: Names that the template reads.

    Raises:
        ModelLoadError: The source is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"is not valid Jinja ({error})", field="chat_template") from None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **extra: Any) -> str:
        """The prompt as text.

        Raises:
            ConfigError: The template refuses these messages, or writes more than 16 MiB.
        """
        values = {**self._tokens, "tools": None, "documents": None, **extra}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **values
            ):
                size += len(piece)
                if size > _LONGEST:
                    raise ConfigError(f"the template wrote more than {_LONGEST:,} characters", field="messages")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the model's chat template refuses them ({error})",
                field="messages",
                remedy="each message needs 'role' and 'content', in an order that the template allows",
            ) from None
        return "".join(pieces)
