"""What the studies' pages have in common: no script, nothing fetched, light and dark, tables that scroll on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from foredraft.lab.plots import Picture, svg
from foredraft.lab.report_style import CSS
from foredraft.lab.schema import Interval

BUSY = 0.5
"""A load above this before a study means that other programs took part in it."""


def document(title: str, lead: Iterable[str], body: str, quick: bool) -> str:
    """The whole page; ``lead`` is plain text, ``body`` is HTML."""
    warning = '<p class="warn">Quick run: toy sizes, nothing here means anything.</p>' if quick else ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lead)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{warning}<ul class='lead'>{items}</ul>{body}"
        "</main></body></html>\n"
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first column heads its rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(picture: Picture, study: Any, caption: str) -> str:
    """A picture of the study, drawn into the page."""
    return f'<figure><div class="scroll">{svg(picture, study)}</div><figcaption>{caption}</figcaption></figure>'


def spread(value: str, interval: Interval, form: str) -> str:
    """A cell: a value with its interval under it."""
    return f"{value} <small>{form.format(interval[0])}–{form.format(interval[1])}</small>"


def busy(load: float | None) -> str:
    """A warning where the machine was not the study's own."""
    if load is None or load <= BUSY:
        return ""
    return f"""
<p class="warn">Other programs were running (load {load:.1f} before the study): times are too long, and
speed-ups less certain than their intervals say. Acceptance and laws are not affected.</p>"""


def origin(provenance: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """Where the figures come from: command, code, machine, and what else the study wants to say."""
    machine = provenance.get("machine", {})
    facts = {
        "command": provenance.get("command"),
        "date": provenance.get("date"),
        "commit": f"{provenance.get('commit')}{' (with local changes)' if provenance.get('dirty') else ''}",
        "processor": machine.get("cpu"),
        "cores": machine.get("cores"),
        "versions": ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items()),
        **more,
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>Where these figures come from</h2><dl>{items}</dl>"


def took(seconds: Mapping[str, float]) -> str:
    """``part 12, part 3``."""
    return ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
