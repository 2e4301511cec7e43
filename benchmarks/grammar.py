"""What masks of two grammar libraries cost at draft positions, on a real vocabulary with one thread.

Each text is read token by token. At every position the mask is computed, as verification needs it for each of its rows;
then a draft of four tokens is taken back and read again. Times are minima over repeats, since other programs only add.
"first" is one pass over the text with everything cold, which is what a request pays that is the first with its grammar.

    python benchmarks/grammar.py [--repeats 15]        # needs: pip install xgrammar; without it only ours is measured
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from record import Record

from foredraft.config import SamplingParams
from foredraft.engine.structures import Structures
from foredraft.grammar import structure_of
from foredraft.models.loading import load_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "bcd", "xyz"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
JSON = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematics", "poetry", "x"], "kind": "xyz"}'
REGEX = r"[a-z]+@[a-z]+\.(com|org), [0-9]{3}-[0-9]{4}(, .*)?"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "JSON Schema": ({"json_schema": SCHEMA}, JSON),
    "any JSON object": ({"json_object": True}, JSON),
    "regular expression": ({"regex": REGEX}, "hello@example.com, 555-1234, and some more text that follows here"),
}


class Matcher(Protocol):
    """One library's parser over one grammar."""

    def mask(self) -> None: ...

    def read(self, token: int) -> None: ...

    def back(self, tokens: int) -> None: ...


class Ours:
    """llguidance, as :class:`foredraft.grammar.Grammar` uses it."""

    def __init__(self, structures: Structures, fields: dict[str, Any]) -> None:
        vocabulary = structures.vocabulary
        structure = structure_of(SamplingParams(**fields), vocabulary.names)
        assert structure is not None
        self._matcher = LLMatcher(vocabulary.backend, structure.source, log_level=0)
        self._buffer = np.zeros(vocabulary.size // 32 + 1, dtype=np.int32)

    def mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)

    def read(self, token: int) -> None:
        assert self._matcher.try_consume_tokens([token]), token

    def back(self, tokens: int) -> None:
        self._matcher.rollback(tokens)


class Xgrammar:
    """The other library, with its cache of compiled grammars off, so that compiling is seen."""

    def __init__(self, library: Any, info: Any, fields: dict[str, Any]) -> None:
        compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        if "regex" in fields:
            compiled = compiler.compile_regex(fields["regex"])
        elif "json_schema" in fields:
            compiled = compiler.compile_json_schema(json.dumps(fields["json_schema"]), any_whitespace=True)
        else:
            compiled = compiler.compile_builtin_json_grammar()
        self._matcher = library.GrammarMatcher(compiled)
        self._buffer = torch.zeros(1, (info.vocab_size + 31) // 32, dtype=torch.int32)

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._buffer)

    def read(self, token: int) -> None:
        assert self._matcher.accept_token(token), token

    def back(self, tokens: int) -> None:
        self._matcher.rollback(tokens)


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Least time of several calls."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def first_use(make: Callable[[], Matcher], ids: Sequence[int]) -> float:
    """Compiling, then every mask of the text once."""
    matcher = make()
    for token in ids:
        matcher.mask()
        matcher.read(token)
    return 0.0


def measure(make: Callable[[], Matcher], ids: Sequence[int], repeats: int) -> dict[str, float]:
    """Times in microseconds."""
    matcher = make()
    masks, drafts = [], []
    for at, token in enumerate(ids):
        masks.append(1e6 * seconds(matcher.mask, repeats))
        draft = list(ids[at : at + 4])

        def verify(draft: list[int] = draft) -> None:
            for drafted in draft:
                matcher.read(drafted)
                matcher.mask()
            matcher.back(len(draft))

        if at + 4 < len(ids):
            drafts.append(1e6 * seconds(verify, repeats))
        matcher.read(token)
    return {
        "compile_us": 1e6 * seconds(make, repeats),
        "first_us": 1e6 * seconds(lambda: first_use(make, ids), max(repeats // 3, 3)),
        "mask_us_median": statistics.median(masks),
        "mask_us_max": max(masks),
        "draft_of_4_us_median": statistics.median(drafts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_model(args.target).tokenizer
    assert tokenizer is not None
    structures = Structures(tokenizer, tokenizer.vocab_size)
    makers: dict[str, Callable[[dict[str, Any]], Matcher]] = {"llguidance": lambda fields: Ours(structures, fields)}
    try:
        import xgrammar
    except ImportError:
        print("xgrammar is not installed, so it is left out")
    else:
        size = tokenizer.vocab_size
        names = [tokenizer.backend.id_to_token(id) for id in range(size)]
        info = xgrammar.TokenizerInfo(
            names, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=sorted(tokenizer.eos_ids)
        )
        makers["xgrammar"] = lambda fields: Xgrammar(xgrammar, info, fields)
    record = Record("grammar", fresh=True)
    record.data |= {"target": args.target, "vocabulary": tokenizer.vocab_size, "repeats": args.repeats}
    for name, (fields, text) in CASES.items():
        ids = tokenizer.encode(text, special=False)
        for library, make in makers.items():
            part = measure(lambda make=make, fields=fields: make(fields), ids, args.repeats)  # type: ignore[misc]
            record.put(f"{name}, {library}", {"tokens": len(ids), **part})
            figures = ", ".join(f"{key} {value:.0f}" for key, value in part.items())
            print(f"{name}, {library}: {figures}", flush=True)


if __name__ == "__main__":
    main()
