"""Suffix decoding: copies what followed the end of the text most often, here and in past outputs.

Oliaro 2024 (arXiv 2411.04975). For every suffix of the text that occurred before, here or in a past output of the same
tenant, the likeliest tokens are followed; the suffix with the highest expected number of accepted tokens wins.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from foredraft.drafters.base import DrafterContext, DraftRequest, require_trees
from foredraft.drafters.copying import Copy, CopyDrafter
from foredraft.drafters.suffix_compiled import automaton
from foredraft.drafters.suffix_file import load, save, vocabulary
from foredraft.drafters.suffix_pool import SuffixPool
from foredraft.errors import ConfigError

log = logging.getLogger("foredraft")

MIB = 1 << 20


class _Search:
    """The text of one request: its own automaton, and where its end stands in those of past outputs."""

    def __init__(self, drafter: SuffixDrafter, tenant: str) -> None:
        self.drafter = drafter
        self.tenant = tenant
        self.own = automaton(drafter.depth)
        self.places: dict[Any, Any] = {}  # automaton of past outputs -> place

    def copy(self, ids: Sequence[int], limit: int) -> Copy | None:
        """The copy that is worth most; of equals the text's own, then that of the youngest outputs."""
        drafter = self.drafter
        rules = (limit, drafter.factor, drafter.min_prob, drafter.tree)
        new = ids[self.own.size :]
        self.own.extend(new)
        best = self.own.find(None, *rules)
        places: dict[Any, Any] = {}
        for generation in reversed(drafter.pool.generations(self.tenant)):
            past: Any = generation.automaton
            known = self.places.get(past)
            place = places[past] = past.start() if known is None else known
            past.follow(place, ids[-drafter.depth :] if known is None else new)
            best = past.find(place, *rules, 0.0 if best is None else best.worth) or best
        self.places = places
        return None if best is None else Copy(best.tokens, best.match, best.shares, best.parents)


class SuffixDrafter(CopyDrafter):
    """Copies from the request's own text and from past outputs of its tenant.

    The names and values of the thresholds are those that vLLM's users know.

    Args:
        depth: Longest context to match, in tokens.
        factor: Most tokens to copy for each token of the match.
        min_prob: Copy while the product of the shares ``C`` is at least this.
        pool: Memory for past outputs of all tenants, in MiB; 0 keeps none.
        file: Where past outputs are kept between runs: read when an engine takes the drafter, written at
            :meth:`save` and when the drafter goes.
        tree: Draft several continuations as a tree, the nodes with the largest products of shares.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "suffix"

    def __init__(
        self,
        depth: int = 24,
        factor: float = 1.0,
        min_prob: float = 0.1,
        pool: int = 64,
        file: str | Path | None = None,
        tree: bool = False,
    ) -> None:
        super().__init__()
        for name, value, low, high in (
            ("depth", depth, 1, 256),
            ("factor", factor, 0.01, 128),
            ("min_prob", min_prob, 0, 1),
            ("pool", pool, 0, 1 << 20),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high} (got {value})", field="drafter suffix")
        if file is not None and not pool:
            raise ConfigError("a file needs a pool", field="drafter suffix", remedy="leave pool=0 out")
        self.depth = depth
        self.factor = factor
        self.min_prob = min_prob
        self.pool = SuffixPool(depth, pool * MIB)
        self.tree = tree
        self.file = None if file is None else Path(file)
        self._meaning: str | None = None

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        kinds: dict[str, Callable[[str], object]] = {
            "depth": int,
            "factor": float,
            "min_prob": float,
            "pool": int,
            "file": str,
        }
        options: dict[str, object] = {}
        for part in argument.split(",") if argument else ():
            if part == "tree":
                options["tree"] = True
                continue
            name, equals, text = part.partition("=")
            try:
                options[name] = kinds[name](text)
            except (KeyError, ValueError):
                equals = ""
            if not equals or not text:
                raise ConfigError(
                    f"{part!r} is not one of {', '.join(f'{known}=…' for known in kinds)}, tree",
                    field="drafter suffix",
                    remedy="for example suffix:depth=24,factor=2",
                )
        return cls(**options)  # type: ignore[arg-type]

    def attach(self, context: DrafterContext) -> None:
        if self.tree:
            require_trees(context)
        if self.file is not None:
            meaning = vocabulary(context)
            if self.file.exists():
                load(self.pool, self.file, meaning, context.target.vocab_size)
            elif not os.access(self.file.parent, os.W_OK):  # said now, not when the outputs are lost
                raise ConfigError(
                    f"{self.file} cannot be written",
                    field="drafter suffix",
                    remedy="give file= a path in a folder of yours",
                )
            self._meaning = meaning
            weakref.finalize(self, _save_quietly, self.pool, self.file, meaning)

    def save(self) -> None:
        """Writes the pool to its file.

        Raises:
            ConfigError: The drafter has no file, or no engine yet.
        """
        if self.file is None or self._meaning is None:
            raise ConfigError("nothing to save to", field="drafter suffix", remedy="give file= and make an engine")
        save(self.pool, self.file, self._meaning)

    def finder(self, request: DraftRequest) -> Callable[[Sequence[int], int], Copy | None]:
        return _Search(self, request.tenant).copy

    def stop(self, request: DraftRequest) -> None:
        super().stop(request)
        self.pool.add(request.tenant, request.ids[request.prompt_length :])

    def reset(self) -> None:
        """Forgets all past outputs."""
        self.pool.clear()


def _save_quietly(pool: SuffixPool, path: Path, meaning: str) -> None:
    try:
        save(pool, path, meaning)
    except OSError as error:
        log.warning("past outputs could not be kept in %s: %s", path, error)
