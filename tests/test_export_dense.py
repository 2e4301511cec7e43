"""A model taken out of its GGUF file: the same numbers, in the folder that other servers read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import Cli

from foredraft.errors import ConfigError
from foredraft.export.dense import write_dense
from foredraft.models import catalog
from foredraft.models.base import Segment
from foredraft.models.info import LoadedModel
from foredraft.models.loading import load_model

TARGET = catalog.resolve("smollm2-135m")


@pytest.mark.real_model
@pytest.mark.skipif(TARGET is None, reason="the small real model is not here")
def test_a_dense_model_computes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "rest").write_text("of an interrupted attempt")
    outcome = Cli(capsys)("export", "smollm2-135m", "--out", str(tmp_path / "out"), "--dtype", "float32")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{tmp_path / 'out'}: float32 weights, 538 MB\n"
    assert not (tmp_path / "out.part").exists()
    packed, dense = load_model("smollm2-135m", dtype="float32"), load_model(tmp_path / "out", dtype="float32")
    assert packed.tokenizer is not None
    assert dense.tokenizer is not None
    text = "def area(width, height):\n    return"
    ids = dense.tokenizer.encode(text)
    assert ids == packed.tokenizer.encode(text)
    assert dense.tokenizer.chat([{"role": "user", "content": "Hi"}]) == packed.tokenizer.chat(
        [{"role": "user", "content": "Hi"}]
    )
    rows = [_logits(loaded, ids) for loaded in (packed, dense)]
    assert torch.allclose(*rows, atol=2e-3)
    assert torch.equal(rows[0].argmax(-1), rows[1].argmax(-1))


def _logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    target = loaded.target
    slot = target.cache.allocate()
    logits: torch.Tensor = target.forward([Segment(slot, ids)]).logits[0]
    return logits


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        write_dense(tmp_path / "x.gguf", tmp_path / "full")
    cli = Cli(capsys)
    assert "--verifier: is for heads only" in cli("export", "x.gguf", "--out", "y", "--verifier", "a/b").error_line
    assert "--verifier: a head must name the model" in cli("export", "folder", "--out", "y").error_line
    assert "no such file" in cli("export", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "y")).error_line
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    outcome = cli("export", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "y"))
    assert outcome.code == 2
    assert "cannot read x.gguf" in outcome.error_line
    assert not (tmp_path / "y").exists()
