"""A small model for the command line's tests: it recites one sentence over and over, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from foredraft.cli import session
from foredraft.cli.main import run
from foredraft.engine import engine as engine_module
from foredraft.errors import ModelLoadError
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import TableModel

SENTENCE = "the café on the hill opens at nine. "
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return Tokenizer(backend, chat_template=template)


def reciter(tokenizer: Tokenizer, max_context: int | None = 4096) -> TableModel:
    """Goes on with the sentence from wherever the prefix ends; starts it anew after anything else."""
    ids = tokenizer.encode(SENTENCE, special=False)

    def logits(prefix: tuple[int, ...]) -> list[float]:
        overlap = next((n for n in range(len(ids) - 1, 0, -1) if prefix[-n:] == tuple(ids[:n])), 0)
        values = [0.0] * tokenizer.vocab_size
        values[ids[overlap]] = 8.0
        return values

    return TableModel(logits, tokenizer.vocab_size, max_context)


def fake_load(template: str | None = TEMPLATE, max_context: int | None = 4096) -> Callable[..., LoadedModel]:
    def load_model(source: str | Path, **_options: Any) -> LoadedModel:
        if "missing" in str(source):
            raise ModelLoadError("no such model", field=str(source), remedy="run: foredraft models")
        tokenizer = byte_tokenizer(template)
        target = reciter(tokenizer, max_context)
        info = ModelInfo("reciter", Path("reciter"), "table", 0, 0, target.vocab_size, 0, "float64", 0)
        return LoadedModel(target, tokenizer, info)

    return load_model


def stand_in(monkeypatch: pytest.MonkeyPatch, template: str | None = TEMPLATE, max_context: int | None = 4096) -> None:
    """Every target that an engine loads is the small model, which no head was made for."""
    monkeypatch.setattr(engine_module, "load_model", fake_load(template, max_context))
    monkeypatch.setattr(session, "usual_drafter", lambda target: session.DEFAULT_DRAFTER)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The only thing on stdout must be one object on one line."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error_line(self) -> str:
        """The only thing on stderr must be one line that starts with ``error: ``."""
        lines = self.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert "Traceback" not in self.out + self.err
        return lines[0].removeprefix("error: ")


class Cli:
    """Runs commands in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *argv: str) -> Outcome:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(list(argv))
        captured = self.capture.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)
