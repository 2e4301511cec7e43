"""The small real model against transformers' own reading of the same file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import SMOLLM2, fresh, read
from test_models_tokenizer import TEXTS

from foredraft.models.base import Segment
from foredraft.models.catalog import resolve
from foredraft.models.loading import load_model

MODEL = SMOLLM2
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL.exists(), reason="the small real model is not here (make fetch)"),
]
PROMPT = "Speculative decoding drafts tokens ahead. 한국어도 됩니다. def add(a, b):\n    return a + b\n 12345"


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_model(MODEL, dtype="float32", device="cpu", cache_bytes=2**29)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()


def test_logits_and_greedy_text_equal_transformers(ours: Any, theirs: Any) -> None:
    target, ids = ours.target, ours.tokenizer.encode(PROMPT)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(fresh(target, ids), expected, atol=1e-3, rtol=1e-4)
    slot = target.cache.allocate()
    logits, text = read(target, slot, ids)[-1], []
    for _ in range(24):
        text.append(int(logits.argmax()))
        logits = read(target, slot, text[-1:])[-1]
    output = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert text == output[0, len(ids) :].tolist()
    # A wrong draft in between changes nothing.
    target.cache.rollback(slot, len(ids))
    for i in range(0, 8):
        logits = target.forward([Segment(slot, [text[i], 5, 6, 7])]).logits[0][0]
        target.cache.commit(slot, 1)
        assert int(logits.argmax()) == text[i + 1]
    target.cache.free(slot)


def test_bfloat16_stays_near_float32(ours: Any) -> None:
    half = load_model(MODEL, dtype="bfloat16", device="cpu", cache_bytes=2**28, layers=4)
    full = load_model(MODEL, dtype="float32", device="cpu", cache_bytes=2**28, layers=4)
    ids = ours.tokenizer.encode(PROMPT)
    mine, exact = fresh(half.target, ids), fresh(full.target, ids)
    assert (mine - exact).abs().mean() < 0.02 * exact.std()
    assert half.info.layers == 4
    assert half.info.parameters < ours.info.parameters


def test_facts(ours: Any, theirs: Any) -> None:
    info = ours.info
    assert (info.architecture, info.layers, info.hidden_size, info.vocab_size) == ("llama", 30, 576, 49152)
    assert info.parameters == sum(p.numel() for p in theirs.parameters())
    assert (info.licence, info.file_bytes) == ("apache-2.0", 98_362_432)


def test_tokenizer(ours: Any) -> None:
    from transformers import AutoTokenizer

    mine = ours.tokenizer
    theirs = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    for text in [*TEXTS, Path(__file__).read_text("utf-8")]:
        if not any(char.isnumeric() for char in text):  # SmolLM splits digits one by one; transformers forgets to
            assert mine.encode(text) == theirs.encode(text)
        assert mine.decode(mine.encode(text), skip_special=False) == text
    digits = mine.encode("a 2026")
    assert [mine.decode([token]) for token in digits] == ["a", " ", "2", "0", "2", "6"]
    assert mine.backend.token_to_id("<|im_end|>") in mine.eos_ids
    talk = [{"role": "user", "content": "Who are you? 😀"}]
    assert mine.chat(talk) == theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    stream = mine.stream_decoder()
    parts = [stream.push(token) for token in mine.encode("👩‍👩‍👧‍👦 한국어")]
    assert "".join([*parts, stream.flush()]) == "👩‍👩‍👧‍👦 한국어"
    assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_other_real_models(name: str) -> None:
    """Q4_K, Q5_0 and Q6_K blocks, windows of 512 and other tokenizers, where the user has fetched these models."""
    path = resolve(name)
    if path is None:
        pytest.skip(f"{name} is not here (foredraft models fetch {name})")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    loaded = load_model(path, dtype="float32", device="cpu", cache_bytes=2**29)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        if "\u0301" not in text:  # transformers forgets Qwen's normalisation of combining marks
            assert loaded.tokenizer is not None
            assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    ids = tokenizer.encode(PROMPT * 20)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(fresh(loaded.target, ids), expected, atol=1e-3, rtol=1e-3)


def test_loading_leaves_the_process_as_it_was() -> None:
    """Neither transformers nor a hub client is imported on the common path: start-up is what users feel first."""
    code = (
        "import sys, torch; torch.set_num_threads(2)\n"
        "from foredraft.models.loading import load_model\n"
        f"loaded = load_model({str(MODEL)!r}, dtype='float32', device='cpu', layers=1, cache_bytes=2**24)\n"
        "loaded.tokenizer.chat([{'role': 'user', 'content': 'x'}])\n"
        "assert torch.get_num_threads() == 2\n"
        "assert not {'transformers', 'huggingface_hub'} & set(sys.modules), 'slow imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
