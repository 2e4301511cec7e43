"""Command-line options derived from the schema in :mod:`foredraft.config`: a new field there is a new option here."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from foredraft.config import Schema
from foredraft.errors import ConfigError

S = TypeVar("S", bound=Schema)
Given = dict[str, Any]
"""Options that the user gave, by field name, as typed on the command line; absent ones are left out."""


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _as_text(doc: str) -> str:
    """A docstring without its markup, on one line."""
    return " ".join(re.sub(r":[a-z]+:`~?([^`]*)`", r"\1", doc).replace("`", "").split())


@functools.cache
def field_docs(schema: type[Schema]) -> dict[str, str]:
    """The string under each field of a schema and its bases, as one paragraph."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if not (issubclass(cls, Schema) and cls is not Schema):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, doc in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[field.target.id] = _as_text(str(doc.value.value))
    return docs


def _plain(annotation: Any) -> Any:
    """The type inside ``Annotated`` and ``| None``."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    choices = [arg for arg in get_args(annotation) if arg is not NoneType]
    if NoneType in get_args(annotation) and len(choices) == 1:
        return _plain(choices[0])
    return annotation


@functools.cache
def field_types(schema: type[Schema]) -> dict[str, Any]:
    hints = get_type_hints(schema, include_extras=True)
    return {name: _plain(hints[name]) for name in schema.model_fields}


def _is_callable(kind: Any) -> bool:
    return get_origin(kind) is Callable or get_origin(kind) is get_origin(Callable[..., Any]) or kind is Callable


def on_command_line(kind: Any) -> bool:
    """Whether a value of this type can be written on a command line: a lone Python callable cannot."""
    return not _is_callable(kind)


def metavar(kind: Any) -> str:
    """How a value is written, such as ``N`` or ``auto|N``."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return (
            ",".join([metavar(_plain(args[0]))] * 2) + "…" if get_origin(_plain(args[0])) is tuple else metavar(args[0])
        )
    if origin is dict:
        return f"{metavar(args[0])}={metavar(args[1])}"
    if args and origin is not Annotated and not _is_callable(kind):  # a union
        return "|".join(sorted((metavar(arg) for arg in args if arg is not NoneType), key=str.isupper))
    names = {int: "N", float: "X", str: "TEXT"}
    return "MODULE:NAME" if _is_callable(kind) else names.get(_plain(kind), "VALUE")


def _scalar(kind: Any, text: str) -> Any:
    """Numbers become numbers, so that complaints show them as such; the schema judges all the rest."""
    accepted = {kind, *map(_plain, get_args(kind))}
    for number in (int, float):
        if accepted & {number, float}:  # "1" is a fine value of a float field, and complaints show it as typed
            try:
                return number(text)
            except ValueError:
                continue
    return text


def _imported(text: str) -> Any:
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(f"cannot import {text!r} ({problem})", remedy="write MODULE:NAME") from None


def parse(kind: Any, value: Any) -> Any:
    """Turns what was typed into what the schema takes; values are judged there, not here."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        inner = _plain(args[0])
        if _is_callable(inner):
            return tuple(map(_imported, value))
        if get_origin(inner) is tuple:
            return tuple(parse(inner, [text]) for text in value)
        if inner is int:
            value = [part.strip() for text in value for part in text.split(",")]
        return tuple(_scalar(inner, text) for text in value)
    if origin is dict:
        pairs = [text.partition("=") for text in value]
        if not all(mark for _, mark, _ in pairs):
            raise ConfigError(f"{value[0]!r} is not a pair", remedy=f"write {metavar(kind)}")
        return {_scalar(_plain(args[0]), key): _scalar(_plain(args[1]), number) for key, _, number in pairs}
    return _scalar(kind, value) if isinstance(value, str) else value


def build(schema: type[S], given: Mapping[str, Any], **defaults: Any) -> S:
    """Makes the schema's object of the options that belong to it; errors name the option as it is typed."""
    return schema(**collect(schema, given, **defaults))


def collect(schema: type[Schema], given: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The keyword arguments of ``schema`` among the given options, over the command's own defaults."""
    values: dict[str, Any] = dict(defaults)
    hints = get_type_hints(schema, include_extras=True)
    for name, kind in field_types(schema).items():
        if name in given:
            if given[name] == "none" and NoneType in get_args(hints[name]):
                values[name] = None
                continue
            try:
                values[name] = parse(kind, given[name])
            except ConfigError as error:
                raise ConfigError(error.problem, field=name, remedy=error.remedy) from None
    return values


def _parameter(schema: type[Schema], name: str, panel: str, default: Any) -> inspect.Parameter:
    kind, flag = field_types(schema)[name], flag_name(name)
    several = get_origin(kind) in (tuple, dict)
    help_text = field_docs(schema).get(name, "") + (" Repeatable." if several else "")
    shown = default if default is not None else schema.model_fields[name].default
    unset = default is not None and schema.model_fields[name].default is None
    show_default: Any = str(shown) if isinstance(shown, int | float | str) and not several else False
    annotation: Any = list[str] | None if several else str | None
    if kind is bool:
        flag, annotation, show_default = f"{flag}/--no-{flag[2:]}", bool | None, "on" if shown else "off"
    option = typer.Option(
        flag,
        help=help_text,
        metavar=None if kind is bool else metavar(kind) + ("|none" if unset else ""),
        rich_help_panel=panel,
        show_default=show_default,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def schema_options(
    panels: Mapping[str, type[Schema]], defaults: Mapping[str, Any] | None = None, skip: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command one option a field of each schema; the command receives them as ``given``.

    Args:
        panels: Heading in the help -> schema. A field that an earlier schema has is not repeated.
        defaults: The command's own defaults, shown in its help; pass them to :func:`build` too.
        skip: Fields that the command spells in its own way.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        generated: dict[str, inspect.Parameter] = {}
        for panel, schema in panels.items():
            for name, kind in field_types(schema).items():
                if name not in generated and name not in skip and on_command_line(kind):
                    generated[name] = _parameter(schema, name, panel, (defaults or {}).get(name))
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            given = {name: values.pop(name) for name in generated}
            # Typer gives an absent repeatable option as None or as an empty list, depending on its version.
            return command(**values, given={k: v for k, v in given.items() if v is not None and v != []})

        parameters = [*own, *generated.values()]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        del wrapper.__wrapped__
        return wrapper

    return decorate
