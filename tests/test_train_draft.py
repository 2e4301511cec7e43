"""Distilling a draft model: each loss is its formula and falls, what is written loads and drafts, resume is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import models_support
import pytest
import torch
from test_train_docs import make_model
from test_train_eagle import answer

from foredraft import Engine, SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.errors import ConfigError, ForedraftError
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.models.loading import load_model
from foredraft.train.answers import AnswerTexts, read_answers
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.config import DraftTraining
from foredraft.train.draft import DraftTask, divergence, scored
from foredraft.train.drafts import train_draft
from foredraft.train.loop import Trainer
from foredraft.train.shards import Sample
from foredraft.train.student import make_student, write_student
from foredraft.train.texts import ShardTexts, Texts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    models_support.make_hf("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def data(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    assert isinstance(loaded.target, Decoder)
    answer(loaded.target, path, range(44))
    return path


def options(**changes: object) -> DraftTraining:
    settings = {"steps": 12, "batch": 3, "warmup": 2, "lr": 3e-3, "save_every": 4, "measure_every": 3, "hidden": 32}
    if "first_layers" in changes:
        del settings["hidden"]
    return DraftTraining(**(settings | changes))


def trainer(loaded: LoadedModel, texts: Texts, out: Path, **changes: object) -> Trainer:
    torch.set_num_threads(1)
    config = options(**changes)
    return Trainer(DraftTask(loaded, make_student(loaded, config, CPU), config, texts), config, out)


def samples(data: Path) -> list[Sample]:
    texts = ShardTexts(data)
    return [sample for name in texts.names() for sample in texts.read(name)]


def test_divergences_are_their_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.rand(5, 9, generator=generator).log_softmax(-1) for _ in range(2))
    for row in range(5):
        pairs = list(zip(p[row].exp().tolist(), q[row].exp().tolist(), strict=True))
        expected = {
            "kl": sum(a * torch.log(torch.tensor(a / b)).item() for a, b in pairs),
            "reverse-kl": sum(b * torch.log(torch.tensor(b / a)).item() for a, b in pairs),
            "tv": 1 - sum(min(a, b) for a, b in pairs),
        }
        for kind, value in expected.items():
            assert float(divergence(kind, p, q)[row]) == pytest.approx(value, abs=1e-6), kind


def test_recorded_states_and_a_pass_give_the_same_law(loaded: LoadedModel, data: Path, tmp_path: Path) -> None:
    run = trainer(loaded, ShardTexts(data), tmp_path)
    assert isinstance(run.task, DraftTask)
    for sample in samples(data)[:4]:
        recorded = run.task._teacher(sample).exp()
        passed = run.task._teacher(replace(sample, taps=torch.empty(0))).exp()
        assert recorded.shape == passed.shape == (len(sample.ids) - sample.prompt_length, 101)
        assert torch.allclose(recorded, passed, atol=0.03)  # states are kept in bfloat16
        greedy = [int(row.argmax()) for row in passed]
        assert greedy == sample.ids[sample.prompt_length :] or sample.number % 2


@pytest.mark.parametrize(
    ("loss", "on_policy"), [("kl", 0.0), ("reverse-kl", 0.0), ("tv", 0.0), ("sequence", 0.0), ("kl", 0.5), ("tv", 1.0)]
)
def test_every_loss_falls_and_the_student_becomes_more_like_the_target(
    loaded: LoadedModel, data: Path, tmp_path: Path, loss: str, on_policy: float
) -> None:
    changes = {"steps": 60, "lr": 1e-3, "loss": loss, "on_policy": on_policy, "measure_every": 30, "first_layers": 2}
    run = trainer(loaded, ShardTexts(data), tmp_path, **changes)
    texts = samples(data)[:16]
    run.task.held_out = texts

    @torch.no_grad()
    def mean() -> float:
        pairs = [run.task.loss(sample, 0) for sample in texts]
        return sum(float(value) for value, _ in pairs) / sum(size for _, size in pairs)

    before, (alpha, tau, overlap) = mean(), run.measure()
    run.run()
    after = run.measure()
    assert mean() < (0.9 if on_policy < 1 else 0.95) * before
    assert after[0][0] > alpha[0] + 0.02  # 60 steps of total variation on own samples bring least
    assert after[1] > tau or on_policy == 1  # own samples of a weak student teach little of greedy texts
    if loss != "sequence":  # which makes the student sure of greedy texts, not like the law
        assert after[2] > overlap + (0.03 if on_policy < 1 else 0.015)


def test_on_policy_texts_are_the_students_and_belong_to_seed_step_and_text(
    loaded: LoadedModel, data: Path, tmp_path: Path
) -> None:
    run = trainer(loaded, ShardTexts(data), tmp_path, on_policy=0.5)
    batch = samples(data)[:24]
    first, again, later = (run.task.prepare(batch, step) for step in (3, 3, 4))
    assert [s.ids for s in first] == [s.ids for s in again] != [s.ids for s in later]
    changed = [new for old, new in zip(batch, first, strict=True) if new is not old]
    assert 5 <= len(changed) <= 19
    assert all(not len(new.taps) for new in changed)
    for new in changed:
        old = next(s for s in batch if s.number == new.number)
        assert new.ids[: new.prompt_length] == old.ids[: old.prompt_length]
        assert len(new.ids) <= len(old.ids)
    alone = run.task.prepare([batch[5]], 3)  # the same whatever shares the batch
    assert alone[0].ids == first[5].ids


FAMILIES = ("llama", "llama_bias_untied", "qwen2", "qwen3", "gemma2", "gemma3", "mistral_window", "llama3_rope")


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_are_the_targets_and_survive_being_written(family: str, tmp_path: Path) -> None:
    models_support.make_hf(family).save_pretrained(tmp_path / "target")
    loaded = load_model(tmp_path / "target", dtype="float32", device="cpu")
    student = make_student(loaded, options(first_layers=2), CPU)
    write_student(tmp_path / "draft", student.config, student.weights(), loaded, torch.float32)
    tokens = models_support.random_tokens(20, seed=3)
    expected = load_model(tmp_path / "target", dtype="float32", device="cpu", layers=2).target
    found = load_model(tmp_path / "draft", dtype="float32", device="cpu").target
    assert torch.allclose(models_support.fresh(found, tokens), models_support.fresh(expected, tokens), atol=1e-5)
    logits, _ = student.model.full(torch.tensor([tokens]), logits_from=7)
    assert torch.allclose(logits[0], models_support.fresh(expected, tokens)[7:], atol=1e-4)


def test_gradients_reach_every_trained_weight(loaded: LoadedModel, data: Path) -> None:
    for changes in ({}, {"first_layers": 2}):
        config = options(**changes)
        task = DraftTask(loaded, make_student(loaded, config, CPU), config, ShardTexts(data))
        loss, _ = task.loss(samples(data)[0], 0)
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(value.grad is not None and float(value.grad.abs().max()) > 0 for value in task.parameters.values())


def test_a_trained_draft_loads_drafts_and_accepts_what_was_measured(
    loaded: LoadedModel, data: Path, tmp_path: Path
) -> None:
    config = options(steps=150, lr=1e-2, measure_every=150, batch=4, first_layers=3)
    made = train_draft(loaded, tmp_path, config, data=data)
    history = json.loads((tmp_path / "history.json").read_text())
    draft = load_model(made, dtype="float32", device="cpu")
    assert draft.target.vocab_size == loaded.target.vocab_size
    prompts = [s.ids[: s.prompt_length] for s in samples(data)[:16]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = Engine(loaded.target).generate(prompts, params)
    results = Engine(loaded.target, ModelDrafter(draft.target), k=1).generate(prompts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    tried, accepted = (
        sum(getattr(r.stats, name) for r in results) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    run = trainer(loaded, ShardTexts(data), tmp_path / "again", first_layers=3)
    run.task.held_out = samples(data)[:16]
    with torch.no_grad():
        for name, value in load_checkpoint(tmp_path / "checkpoint.safetensors")[0].items():
            if name.startswith("net."):
                run.task.parameters[name.removeprefix("net.")].copy_(value)
    assert accepted / tried == pytest.approx(run.measure()[0][0], abs=0.15)
    assert accepted / tried > 0.25
    assert history[-1]["step"] == 150


@torch.no_grad()
def test_held_out_acceptance_is_one_minus_tv(loaded: LoadedModel, data: Path, tmp_path: Path) -> None:
    run = trainer(loaded, ShardTexts(data), tmp_path)
    assert isinstance(run.task, DraftTask)
    run.task.held_out = samples(data)[:3]
    sums, rows, same = 0.0, 0, 0
    for sample in run.task.held_out:
        p = scored(loaded.target, sample.ids[:-1], sample.prompt_length - 1).softmax(-1)
        q = run.task.student.model.full(torch.tensor([sample.ids[:-1]]))[0][0, sample.prompt_length - 1 :].softmax(-1)
        sums += float((1 - (p - q).abs().sum(-1) / 2).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        rows += len(p)
    assert run.measure()[2] == pytest.approx(sums / rows, abs=0.01)


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_train_draft as own
from foredraft.models.loading import load_model
from foredraft.train.texts import ShardTexts
loaded = load_model(Path({folder!r}), dtype="float32", device="cpu")
run = own.trainer(loaded, ShardTexts(Path({data!r})), Path({out!r}), on_policy=0.4)
def stop(measure):
    if measure.step >= 9:
        os.kill(os.getpid(), signal.SIGKILL)
run.run(stop)
"""


def test_a_killed_run_goes_on_to_the_same_bits(loaded: LoadedModel, folder: Path, data: Path, tmp_path: Path) -> None:
    texts = ShardTexts(data)
    whole = trainer(loaded, texts, tmp_path / "whole", on_policy=0.4)
    expected = whole.run()
    out = tmp_path / "killed"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder), data=str(data), out=str(out))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    resumed = trainer(loaded, texts, out, on_policy=0.4)
    assert resumed.progress.step == 8
    found = resumed.run()
    assert [(m.step, m.loss, m.alpha, m.overlap) for m in found] == [
        (m.step, m.loss, m.alpha, m.overlap) for m in expected
    ]
    left, right = (load_checkpoint(run.checkpoint)[0] for run in (whole, resumed))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_bfloat16_and_early_stop(loaded: LoadedModel, data: Path, tmp_path: Path) -> None:
    run = trainer(loaded, ShardTexts(data), tmp_path / "a", steps=40, lr=1e-2, precision="bfloat16", measure_every=20)
    history = run.run()
    assert history[-1].loss < history[0].loss
    assert all(value.dtype == torch.float32 for value in run.task.parameters.values())
    stale = trainer(loaded, ShardTexts(data), tmp_path / "b", steps=400, measure_every=1, patience=2, lr=1e-9)
    assert len(stale.run()) == 3


# --- plain answers


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("talker")
    make_model(path)
    return load_model(path, dtype="float32", device="cpu")


def test_plain_answers_are_read_with_their_prompts(talker: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps(talk) + "\n" + json.dumps({"messages": talk}) + "\nplain text\n")
    texts = read_answers(path, talker.tokenizer, 200)
    assert isinstance(texts, AnswerTexts)
    found = texts.read(texts.names()[0])
    assert talker.tokenizer is not None
    read = talker.tokenizer.decode
    decoded = [(read(s.ids[: s.prompt_length]), read(s.ids[s.prompt_length :])) for s in found]
    assert decoded[0] == decoded[1] == ("u:hi\na:", "hello\na:")  # the template ends so
    assert found[2].prompt_length == 1
    assert "".join(decoded[2]) == "plain text"


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is empty"), ('[{"role": "user", "content": "a"}]', "line 1 holds no messages that end with an answer")],
)
def test_bad_answers_are_named(talker: LoadedModel, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_answers(path, talker.tokenizer, None)


def test_plain_answers_train_a_draft_with_the_targets_tokenizer(talker: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer = {"role": "assistant", "content": "one two three " * 3}
    lines = [[{"role": "user", "content": f"count to {n}"}, answer] for n in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    made = train_draft(talker, tmp_path / "run", options(steps=6, heads=2), answers=path)
    draft = load_model(made, dtype="float32", device="cpu")
    assert talker.tokenizer is not None
    assert draft.tokenizer is not None
    talker.tokenizer.same_vocabulary(draft.tokenizer)
    engine = Engine(talker, ModelDrafter(draft.target, draft.tokenizer), k=3)
    params = SamplingParams(max_tokens=12)
    assert engine.generate(["hello"], params)[0].token_ids == Engine(talker).generate(["hello"], params)[0].token_ids


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "sequence", "on_policy": 0.5}, "needs the target's own answers"),
        ({"hidden": 30, "heads": 4}, "must be an even multiple of heads"),
        ({"first_layers": 2, "layers": 3}, "the target's first layers have its sizes"),
        ({"first_layers": 9}, "must be between 1 and 4"),
    ],
)
def test_what_does_not_fit_is_refused(loaded: LoadedModel, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ForedraftError, match=said):
        make_student(loaded, options(**changes), CPU)


def test_one_source_of_texts_is_wanted(loaded: LoadedModel, data: Path, tmp_path: Path) -> None:
    for sources in ({}, {"data": data, "answers": data}):
        with pytest.raises(ConfigError, match="give one of the two"):
            train_draft(loaded, tmp_path, options(), **sources)
