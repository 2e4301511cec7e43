"""The Qwen pair, where it was fetched (``foredraft models fetch NAME``): real code, the same text, high acceptance."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.models import catalog
from foredraft.models.loading import load_model

SMALL, LARGE = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"


def here(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if catalog.resolve(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not here: {', '.join(missing)} (foredraft models fetch NAME)")


pytestmark = [pytest.mark.real_model, here(SMALL)]
ASK = [{"role": "user", "content": "Write a Python function add(a, b) that returns their sum. Only the code."}]
REPEAT = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n"


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(SMALL, dtype="float32", device="cpu", cache_bytes=1 << 28)
    torch.set_num_threads(threads)
    gc.collect()


def test_the_fetched_file_is_the_publishers() -> None:
    entry = catalog.find(SMALL)
    assert entry is not None
    assert catalog.status(entry, verify=True).verified


def test_it_writes_a_function_that_works(small: Any) -> None:
    text = Engine(target=small).generate([small.tokenizer.chat(ASK)], SamplingParams(max_tokens=48))[0].text
    code = text.split("```python")[-1].split("```")[0]
    tree = ast.parse(code.strip())
    assert [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] == ["add"]
    assert "return a + b" in code


def test_greedy_text_is_the_same_with_lookup(small: Any) -> None:
    params = SamplingParams(max_tokens=24)
    plain = Engine(target=small).generate(REPEAT, params)[0]
    drafted = Engine(target=small, drafter="lookup", k=4).generate(REPEAT, params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@here(LARGE)
def test_the_small_one_drafts_well_for_the_large_one() -> None:
    """On code nearly every drafted token is accepted (0.995 agreement on HumanEval, notes on the pair)."""
    engine = Engine(target=LARGE, drafter=f"model:{SMALL}", k=3, dtype="bfloat16", cache_bytes=1 << 28)
    result = engine.generate(REPEAT, SamplingParams(max_tokens=24))[0]
    assert result.metrics["speculative_decoding"]["draft_acceptance_rate"] > 0.7
