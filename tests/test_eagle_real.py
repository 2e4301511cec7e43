"""The head that comes with the package, on the model that it was trained for."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_checkpoint import EMBEDDED, embedded_head, load_head
from foredraft.engine.stats import SpecStats
from foredraft.errors import ConfigError, VocabularyMismatchError
from foredraft.models import catalog
from foredraft.models.info import LoadedModel
from foredraft.models.loading import load_model
from foredraft.testing import TableModel

FOLDER = files("foredraft") / "assets" / EMBEDDED
PROMPTS = [
    "Explain in three sentences how a bicycle stays upright.",
    "Write a Python function that returns the sum of the digits of a number.",
    "Name five rivers and one fact about each.",
]

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here"),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded, "eagle3", k=5, verify="block")


def test_the_files_are_small_and_say_where_they_come_from() -> None:
    size = sum(len(file.read_bytes()) for file in FOLDER.iterdir())
    assert size < 30e6
    card = (FOLDER / "README.md").read_text("utf-8")
    for word in ("Apache-2.0", "SmolLM2-135M-Instruct", "make embedded-head"):
        assert word in card
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert config["speculators_config"]["verifier"]["name_or_path"].endswith("SmolLM2-135M-Instruct")


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 1.4), (1.0, 1.2)])
def test_it_drafts_what_the_target_writes(
    engine: Engine, loaded: LoadedModel, temperature: float, least: float
) -> None:
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    params = [SamplingParams(temperature=temperature, max_tokens=64, seed=n) for n in range(len(prompts))]
    results = engine.generate(prompts, params)
    pooled = SpecStats()
    for result in results:
        pooled.merge(result.stats)
    assert (pooled.tokens_per_step or 0) > least
    if temperature == 0.0:
        plain = Engine(loaded).generate(prompts, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]


def test_another_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="serves smollm2-135m only"):
        embedded_head(TableModel(lambda _: [0.0] * 5, 5))


def test_another_model_of_the_same_size_is_refused(engine: Engine) -> None:
    class Other:
        vocab_size = 49152
        shape = engine.target.shape  # type: ignore[attr-defined]

        def embed(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.randn(len(tokens), 576)

    with pytest.raises(VocabularyMismatchError, match="another model of the same size"):
        load_head(FOLDER, Other())  # type: ignore[arg-type]


def test_the_registry_makes_it(engine: Engine) -> None:
    assert isinstance(engine.drafter, Eagle3Drafter)
    assert engine.drafter.taps == (2, 15, 27)
