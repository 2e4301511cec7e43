"""Training: what is recorded is what the target computed, the loss falls, and a killed run goes on to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import eagle_support as support
import models_support
import pytest
import torch
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_checkpoint import build_head, packed_product
from foredraft.errors import ConfigError
from foredraft.kernels import PackedLinear, available
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.models.loading import load_model
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.config import EagleTraining
from foredraft.train.eagle import Eagle3Task, candidates
from foredraft.train.eagle_net import EagleNet
from foredraft.train.loop import Trainer
from foredraft.train.record import Recorder, Task, record
from foredraft.train.shards import read_shard, recorded_numbers, shard_paths
from foredraft.train.target_parts import TargetParts
from foredraft.train.texts import ShardTexts, batches, first_place, frequent_tokens, held_out, held_out_texts

TAPS = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    models_support.make_hf("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    found = load_model(folder, dtype="float32", device="cpu").target
    assert isinstance(found, Decoder)
    return found


def answer(target: Decoder, data: Path, numbers: range) -> None:
    layers = target.shape.layers
    engine = Engine(target, Recorder((*TAPS, layers)), k=0, max_batch=4, prefix_reuse=False)
    done = recorded_numbers(data)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    tasks = [Task(n, models_support.random_tokens(3 + n % 4, seed=n), params) for n in numbers if n not in done]
    for _ in record(engine, tasks, data, shard_size=8):
        pass


@pytest.fixture(scope="module")
def data(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    answer(target, path, range(10))
    answer(target, path, range(44))  # goes on: the first ten are there
    return path


def task(
    target: Decoder, data: Path, config: EagleTraining, fresh: bool = True, start: dict[str, Tensor] | None = None
) -> Eagle3Task:
    torch.set_num_threads(1)
    ids = frequent_tokens(data, 60, [0], target.vocab_size)
    own = target.shape
    shape = support.shape(
        taps=TAPS,
        target_hidden=own.hidden_size,
        hidden=own.hidden_size,
        vocab=own.vocab_size,
        draft_vocab=len(ids),
        kv_heads=4,
    )
    return Eagle3Task(target, shape, ids, config, data, fresh, start)


def trainer(target: Decoder, data: Path, out: Path, **options: object) -> Trainer:
    settings = {"steps": 12, "batch": 3, "rollout": 3, "warmup": 2, "lr": 3e-3, "save_every": 4, "measure_every": 3}
    config = EagleTraining(**(settings | options))
    return Trainer(task(target, data, config, not (out / "checkpoint.safetensors").exists()), config, out)


def test_each_prompt_is_answered_once(data: Path) -> None:
    samples = [sample for path in shard_paths(data) for sample in read_shard(path)]
    assert sorted(sample.number for sample in samples) == list(range(44))


def test_what_is_recorded_is_what_the_target_computes(target: Decoder, data: Path) -> None:
    layers = target.shape.layers
    for sample in read_shard(shard_paths(data)[0])[:3]:
        slot = target.cache.allocate()
        output = target.forward([Segment(slot, sample.ids)], (*TAPS, layers))
        target.cache.free(slot)
        assert torch.allclose(output.taps[0][:-1], sample.taps.float(), rtol=0.02, atol=0.02)
        every = torch.arange(target.vocab_size)
        law = TargetParts(target, every).law(output.taps[0][:, -1])
        assert torch.allclose(law, output.logits[0].softmax(-1), atol=1e-4)


def test_other_taps_are_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="record the data again"):
        read_shard(shard_paths(data)[0], (1, 2))


def test_batches_cover_an_epoch_once_and_leave_out_what_is_held_out(target: Decoder, data: Path) -> None:
    taps = (*TAPS, target.shape.layers)
    texts = ShardTexts(data, taps)
    feed = batches(texts, first_place(texts, 1), 2, 1)
    seen, epochs = [], set()
    for _ in range(21):
        batch, place = next(feed)
        seen += [sample.number for sample in batch]
        epochs.add(place.epoch)
    assert epochs == {0}
    assert len(seen) == len(set(seen)) == 42
    assert not {1, 41} & set(seen)
    kept = held_out_texts(texts, 9)
    assert {sample.number for sample in kept} == {1, 41}
    assert all(map(held_out, kept))
    assert next(feed)[1].epoch == 1


def test_a_head_learns_its_texts_and_the_engine_accepts_what_was_measured(
    target: Decoder, data: Path, tmp_path: Path
) -> None:
    run = trainer(target, data, tmp_path, steps=100, batch=4, rollout=2, lr=1e-2, measure_every=50)
    run.task.held_out = [s for path in shard_paths(data) for s in read_shard(path)][:16]  # texts that it learns
    before = run.measure()
    history = run.run()
    alpha, _, overlap = run.measure()
    assert history[-1].loss < history[0].loss
    assert alpha[0] > 0.25 > 2 * before[0][0]
    assert overlap > before[2] + 0.1
    head = build_head(run.task.shape, run.task.weights(), run.task.parts.token_ids, target.embed, bits=32)
    engine = Engine(target, Eagle3Drafter(head), k=1, prefix_reuse=False)
    tried = accepted = 0
    for sample in run.task.held_out:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        result = engine.generate([sample.ids[: sample.prompt_length]], params)[0]
        assert result.prompt_ids + result.token_ids == sample.ids
        tried += result.stats.num_draft_tokens
        accepted += result.stats.num_accepted_draft_tokens
    assert accepted / tried == pytest.approx(alpha[0], abs=0.12)  # decoding drafts only from where a draft ended


@torch.no_grad()
def test_training_starts_from_the_best_linear_head(target: Decoder, data: Path, tmp_path: Path) -> None:
    run = task(target, data, EagleTraining())
    texts = [run._text(sample) for sample in held_out_texts(ShardTexts(data), 9)]

    def loss(rollout: int) -> list[float]:
        rows = [run._draft(text, rollout) for text in texts]
        return [
            float(
                torch.cat(
                    [-(t.law[j:] * r[j].log_softmax(-1)).sum(-1) for t, r in zip(texts, rows, strict=True)]
                ).mean()
            )
            for j in range(rollout)
        ]

    start = loss(2)
    torch.manual_seed(5)
    run.net = EagleNet(run.shape, run.net.tap_scale)
    run.net.set("lm_head.weight", run.parts.rows)
    run.net.set("norm.weight", target.final_norm.weight)
    blind = loss(2)
    assert start[0] < blind[0] - 0.2
    assert start[1] < blind[1] - 0.2


def test_the_sampled_softmax_is_right_on_average() -> None:
    law = torch.rand(30, 60, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(60, generator=torch.Generator().manual_seed(2))
    sums = []
    for number in range(4000):
        tokens, correction = candidates(law, 20, number)
        assert len(set(tokens.tolist())) == 20
        assert set(law.amax(0).topk(10).indices.tolist()) <= set(tokens.tolist())
        sums.append(float((logits[tokens] + correction).exp().sum()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.02)


def test_the_lm_head_stays_the_targets_unless_asked(target: Decoder, data: Path, tmp_path: Path) -> None:
    for wanted in (False, True):
        run = trainer(target, data, tmp_path / str(wanted), steps=2, train_lm_head=wanted)
        run.run()
        assert torch.equal(run.task.weights()["lm_head.weight"], run.task.parts.rows) is not wanted


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_train_eagle as own
from foredraft.models.loading import load_model
target = load_model(Path({folder!r}), dtype="float32", device="cpu").target
run = own.trainer(target, Path({data!r}), Path({out!r}))
def stop(measure):
    if measure.step >= 9:
        os.kill(os.getpid(), signal.SIGKILL)
run.run(stop)
"""


def test_a_killed_run_goes_on_to_the_same_bits(target: Decoder, folder: Path, data: Path, tmp_path: Path) -> None:
    whole = trainer(target, data, tmp_path / "whole")
    expected = whole.run()
    out = tmp_path / "killed"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder), data=str(data), out=str(out))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    resumed = trainer(target, data, out)
    assert resumed.progress.step == 8  # the last checkpoint; step 9 was lost
    found = resumed.run()
    assert [(m.step, m.loss, m.alpha, m.tau, m.overlap) for m in found] == [
        (m.step, m.loss, m.alpha, m.tau, m.overlap) for m in expected
    ]
    left, right = (load_checkpoint(run.checkpoint)[0] for run in (whole, resumed))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(name.startswith("adam.exp_avg_sq") for name in left)


def test_bfloat16_training_learns_too(target: Decoder, data: Path, tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        run = trainer(target, data, tmp_path / precision, steps=40, rollout=2, lr=1e-2, precision=precision)
        history = run.run()
        losses[precision] = history[-1].loss
        assert history[-1].loss < history[0].loss
        assert all(parameter.dtype == torch.float32 for parameter in run.task.parameters.values())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.4)


def test_training_stops_early_and_keeps_the_best(target: Decoder, data: Path, tmp_path: Path) -> None:
    run = trainer(target, data, tmp_path, steps=400, measure_every=1, patience=2, lr=1e-9)
    history = run.run()
    assert len(history) == 3  # the first is the best, two more are no better
    assert load_checkpoint(run.best)[1]["tau"] == max(entry.tau for entry in history)


@pytest.mark.parametrize("first", [0, 3])
def test_gradients_reach_every_weight(first: int) -> None:
    net: EagleNet = support.net()
    logits = net(torch.randn(8, 3, support.WIDTH), torch.randn(8, support.WIDTH), first, 3)
    assert [len(row) for row in logits] == [8 - first - j for j in range(3)]
    torch.cat(logits).square().mean().backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in net.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_the_rollout_grows_but_is_whole_when_a_trained_head_goes_on(target: Decoder, data: Path) -> None:
    config = EagleTraining(steps=12, rollout=3, held_out=2)
    new = task(target, data, config)
    more = task(target, data, config, start=new.weights())
    sample = held_out_texts(new.texts, 1)[0]
    lengths: list[int] = []

    def watch(one: Eagle3Task, step: int) -> int:
        draft = one._draft
        one._draft = lambda text, rollout, tokens=None: lengths.append(rollout) or draft(text, rollout, tokens)  # type: ignore[method-assign,assignment,func-returns-value]
        one.loss(sample, step)
        one._draft = draft  # type: ignore[method-assign]
        return lengths[-1]

    assert [watch(new, step) for step in (0, 4, 8)] == [1, 2, 3]
    assert [watch(more, step) for step in (0, 4, 8)] == [3, 3, 3]
    for name, value in new.weights().items():
        assert torch.allclose(value, more.weights()[name], rtol=1e-5)


@pytest.mark.skipif(not available(), reason="needs the compiled kernels, which do the rounding")
def test_training_rounds_as_drafting_does() -> None:
    """Weight by weight, and again after a step of the optimiser; gradients are those of the weights themselves."""
    shape = support.shape(hidden=32, target_hidden=32, intermediate=64, heads=4, kv_heads=4, head_dim=8)
    net = EagleNet(shape, torch.rand(3 * 32) + 0.5, rounded=True)
    plain = EagleNet(shape, net.tap_scale)
    plain.load_state_dict(net.state_dict())
    taps, embeddings = torch.randn(8, 3, 32), torch.randn(8, 32)
    for _ in range(2):
        for name, value in net.state().items():
            short = name.removesuffix(".weight")
            if value.dim() == 2:
                packed = packed_product(value, 4)
                assert isinstance(packed, PackedLinear)
                scale = net.tap_scale if short == "fc" else 1.0
                rows = packed.rows(torch.arange(value.shape[0])) * scale
                assert torch.allclose(rows, net._weight(short), atol=1e-6), name
                assert not torch.equal(value * scale, net._weight(short)), name
        loss = torch.cat(net(taps, embeddings, 0, 2)).square().mean()
        loss.backward()
        assert all(float(parameter.grad.abs().max()) > 0 for parameter in net.parameters())  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert not torch.equal(net(taps, embeddings, 0, 1)[0], plain(taps, embeddings, 0, 1)[0])


def test_a_run_with_rounded_weights_learns(target: Decoder, data: Path, tmp_path: Path) -> None:
    run = trainer(target, data, tmp_path, steps=40, rollout=2, lr=1e-2, round_weights=True)
    assert isinstance(run.task, Eagle3Task)
    assert run.task.net.rounded
    assert run.task.shape.hidden % 32 == 0
    history = run.run()
    assert history[-1].loss < history[0].loss
