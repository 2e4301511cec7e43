"""Built-in prompts: the same for the same seed, none from a benchmark, and answered once."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train_docs import make_model

from foredraft.bench import workloads
from foredraft.errors import ConfigError
from foredraft.models.loading import load_model
from foredraft.train.prompts import first_prompts, follow_ups
from foredraft.train.run import FOLLOW_UP, record_data
from foredraft.train.shards import recorded_numbers


def test_the_same_seed_gives_the_same_prompts() -> None:
    some, more = first_prompts(200, 3), first_prompts(400, 3)
    assert some == more[:200]
    assert some != first_prompts(200, 4)
    texts = [conversation[0]["content"] for conversation in more]
    assert len(set(texts)) == 400
    assert not any("{" in text.split("\n\n")[0] for text in texts)


def test_no_line_is_in_the_benchmark() -> None:
    ours = "\n".join(message["content"] for talk in first_prompts(3400, 0) for message in talk)
    for prompt in workloads.prompts():
        lines = [line.strip() for line in prompt.messages[-1]["content"].splitlines()]
        assert not [line for line in lines if len(line) > 30 and line in ours], prompt.id


def test_follow_ups_build_on_answers() -> None:
    answered = [([{"role": "user", "content": f"q{n}"}], f"answer {n}") for n in range(40)]
    found = follow_ups(answered, 30, 1)
    assert len(found) == 30
    assert {len(talk) for talk in found} == {1, 3}
    assert all(talk[-1]["role"] == "user" for talk in found)
    assert all("answer" in (talk[0]["content"] if len(talk) == 1 else talk[1]["content"]) for talk in found)


def test_recording_goes_on_where_it_stopped(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    run = record_data(loaded, tmp_path / "data", prompts=8, max_tokens=12, batch=4)
    written = list(run)
    numbers = recorded_numbers(tmp_path / "data")
    assert written[-1] > 0
    assert any(number >= FOLLOW_UP for number in numbers)
    assert {number for number in numbers if number < FOLLOW_UP} <= set(range(6))
    assert list(record_data(loaded, tmp_path / "data", prompts=8, max_tokens=12, batch=4)) == []
    assert recorded_numbers(tmp_path / "data") == numbers


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        next(record_data(load_model(tmp_path / "model"), tmp_path / "data"))
