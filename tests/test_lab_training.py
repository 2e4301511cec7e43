"""The character models: exact sizes, one training run a key, interruption that leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.errors import ForedraftError, ModelLoadError
from foredraft.lab.char_models import DRAFTER, QUICK_DRAFTER, TARGET, CharModelSpec, TrainedModel, train_or_reuse
from foredraft.lab.corpus import Corpus, make_corpus
from foredraft.lab.progress import NoProgress
from foredraft.lab.training import CHECKPOINT, Schedule
from foredraft.models.base import Segment
from foredraft.models.loading import load_model

SCHEDULE = Schedule(steps=12, batch=2, context=32, warmup=3, save_every_s=0.0)


class Interrupting(NoProgress):
    """Cuts the training off after some steps, as a person would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


class Recording(NoProgress):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.advances: list[int] = []

    def stage(self, title: str, total: int) -> None:
        self.stages.append(title)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.advances.append(amount)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus("x", "x", "x", [f"one sentence and another one, number {i}, here it ends" for i in range(900)])


def trained(corpus: Corpus, home: Path, **options: object) -> TrainedModel:
    arguments: dict[str, object] = {"seed": 0, "home": home, **options}
    return train_or_reuse(corpus, QUICK_DRAFTER, SCHEDULE, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("spec", "layers", "parameters"), [(TARGET, 4, 388_608), (DRAFTER, 1, 108_096)])
def test_models_have_the_stated_size(spec: CharModelSpec, layers: int, parameters: int) -> None:
    model = LlamaForCausalLM(spec.config(103, 256))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.num_hidden_layers == layers


def test_training_learns_and_our_loader_agrees_with_transformers(corpus: Corpus, tmp_path: Path) -> None:
    schedule = replace(SCHEDULE, steps=60, batch=8)
    model = train_or_reuse(corpus, QUICK_DRAFTER, schedule, seed=0, home=tmp_path)
    uniform = torch.log(torch.tensor(float(corpus.vocab_size))).item()
    assert model.held_out_loss < 0.8 * uniform
    ids = corpus.encode("number 12, here")
    reference = LlamaForCausalLM.from_pretrained(model.folder).float()
    expected = reference(input_ids=torch.tensor([ids])).logits[0]
    loaded = load_model(model.folder, dtype="float32")
    slot = loaded.target.cache.allocate()
    torch.testing.assert_close(loaded.target.forward([Segment(slot, ids)]).logits[0], expected, atol=1e-4, rtol=1e-4)
    assert loaded.tokenizer is not None
    assert list(loaded.tokenizer.encode("number 12, here")) == ids


def test_a_trained_model_is_reused(corpus: Corpus, tmp_path: Path) -> None:
    first, listener = trained(corpus, tmp_path), Recording()
    second = trained(corpus, tmp_path, progress=listener)
    assert not first.reused
    assert second.reused
    assert listener.stages == []
    assert (second.folder, second.parameters, second.held_out_loss) == (
        first.folder,
        first.parameters,
        first.held_out_loss,
    )
    again = trained(corpus, tmp_path, retrain=True)
    assert not again.reused
    assert trained(corpus, tmp_path, seed=1).folder != first.folder


def test_an_interrupted_run_ends_with_the_same_weights(corpus: Corpus, tmp_path: Path) -> None:
    whole = trained(corpus, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(corpus, tmp_path / "cut", progress=Interrupting(after=7))
    [folder] = (tmp_path / "cut").iterdir()
    assert (folder / CHECKPOINT).is_file()
    listener = Recording()
    resumed = trained(corpus, tmp_path / "cut", progress=listener)
    assert listener.advances[0] == 7, "the run must go on where it was cut off"
    weights = [LlamaForCausalLM.from_pretrained(model.folder).state_dict() for model in (whole, resumed)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=0)
    assert not (folder / CHECKPOINT).exists()


def test_damaged_facts_are_named(corpus: Corpus, tmp_path: Path) -> None:
    model = trained(corpus, tmp_path)
    (model.folder / "trained.json").write_text("{")
    with pytest.raises(ModelLoadError, match="--retrain"):
        trained(corpus, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ForedraftError, match="FOREDRAFT_HOME"):
        trained(corpus, tmp_path / "file")


def test_a_damaged_training_checkpoint_is_named(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(corpus, tmp_path, progress=Interrupting(after=3))
    [folder] = tmp_path.iterdir()
    (folder / CHECKPOINT).write_bytes(b"not a checkpoint")
    with pytest.raises(ForedraftError, match="--retrain"):
        trained(corpus, tmp_path)
    assert not trained(corpus, tmp_path, retrain=True).reused


def test_training_leaves_the_callers_random_numbers_alone(corpus: Corpus, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(corpus, tmp_path)
    torch.testing.assert_close(torch.rand(3), expected)
