"""Training EAGLE-1 heads: both parts of the loss fall, what is written drafts what was measured, resume is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import test_train_eagle as eagle3
import torch
from safetensors.torch import load_file, save_file
from test_train_eagle import data, folder, target  # noqa: F401  (fixtures)

from foredraft import Engine, SamplingParams
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.eagle1 import Eagle1Drafter
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.export.speculators import Verifier, export_head
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.train import check, check_parts
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.config import Eagle1Training
from foredraft.train.eagle1 import Eagle1Task
from foredraft.train.heads import _shape, train_eagle1
from foredraft.train.loop import Trainer
from foredraft.train.record import Recorder, Task, record
from foredraft.train.shards import Sample, read_shard, shard_paths


def task(target: Decoder, data: Path, config: Eagle1Training, fresh: bool = True) -> Eagle1Task:  # noqa: F811
    torch.set_num_threads(1)
    own = target.shape
    return Eagle1Task(target, _shape(own, (own.layers,), own.vocab_size, None, None), config, data, fresh)


def trainer(target: Decoder, data: Path, out: Path, **options: object) -> Trainer:  # noqa: F811
    settings = {"steps": 12, "batch": 3, "warmup": 2, "lr": 3e-3, "save_every": 4, "measure_every": 3}
    config = Eagle1Training(**(settings | options))
    return Trainer(task(target, data, config, not (out / "checkpoint.safetensors").exists()), config, out)


def samples(data: Path) -> list[Sample]:  # noqa: F811
    return [sample for path in shard_paths(data) for sample in read_shard(path)]


def loaded(target: Decoder) -> LoadedModel:  # noqa: F811
    return LoadedModel(target, None, ModelInfo("tiny", Path("."), "llama", 4, 64, 101, 0, "float32", 0))


@torch.no_grad()
def parts_of_the_loss(run: Eagle1Task, texts: list[Sample]) -> tuple[float, float]:
    """Distance of the features and cross-entropy, a token."""
    weight, sums = run.config.token_weight, []
    for token_weight in (0.0, 1.0):
        run.config = run.config.model_copy(update={"token_weight": token_weight, "noise": 0.0})
        pairs = [run.loss(sample, 0) for sample in texts]
        sums.append(sum(float(loss) for loss, _ in pairs) / sum(size for _, size in pairs))
    run.config = run.config.model_copy(update={"token_weight": weight})
    return sums[0], sums[1] - sums[0]


@torch.no_grad()
def test_the_loss_is_smooth_l1_and_cross_entropy_as_published(target: Decoder, data: Path) -> None:  # noqa: F811
    """By the formulas of the paper, one row at a time."""
    run = task(target, data, Eagle1Training(noise=0.0, token_weight=0.1))
    sample = samples(data)[0]
    loss, size = run.loss(sample, 0)
    ids = torch.tensor(sample.ids)
    features = target.final_norm(sample.taps[:, -1].float())
    hidden = run.net.roll(features[:-1], target.embed(ids[1:-1]).float(), 0, 1)[0]
    expected, rows = 0.0, 0
    for t in range(sample.prompt_length - 1, len(ids) - 2):
        far = (hidden[t] - features[t + 1]).abs()
        p = torch.softmax(target.head(features[t + 1][None])[0], -1)
        q = torch.softmax(target.head(hidden[t][None])[0], -1)
        expected += float(torch.where(far < 1, far**2 / 2, far - 0.5).mean() - 0.1 * (p * q.log()).sum())
        rows += 1
    assert size == rows
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_noise_is_uniform_within_its_width_and_belongs_to_step_and_text(target: Decoder, data: Path) -> None:  # noqa: F811
    run = task(target, data, Eagle1Training(noise=0.1))
    sample, seen = samples(data)[0], []
    clean = target.final_norm(sample.taps[:, -1].float())[:-1]
    roll = run.net.roll
    run.net.roll = lambda f, *rest: seen.append(f - clean) or roll(f, *rest)  # type: ignore[func-returns-value,method-assign]
    losses = [float(run.loss(sample, step)[0]) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert 0.095 < float(seen[0].abs().max()) <= 0.1
    assert float(seen[0].mean()) == pytest.approx(0, abs=0.01)
    assert float(seen[0].std()) == pytest.approx(0.2 / 12**0.5, rel=0.05)


def test_a_head_learns_its_texts_and_the_engine_accepts_what_was_measured(
    target: Decoder,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = trainer(target, data, tmp_path, steps=120, batch=4, lr=1e-2, measure_every=60, noise=0.0, token_weight=1.0)
    task_, texts = run.task, samples(data)[:16]
    assert isinstance(task_, Eagle1Task)
    task_.held_out = texts
    before, alpha_before = parts_of_the_loss(task_, texts), run.measure()[0]
    run.run()
    after, (alpha, _, overlap) = parts_of_the_loss(task_, texts), run.measure()
    assert after[0] < 0.9 * before[0]
    assert after[1] < before[1] - 0.1
    assert alpha[0] > alpha_before[0] + 0.1
    assert overlap > 0.2
    head = train_eagle1(loaded(target), data, tmp_path, run.config)  # complete: only writes
    drafter = Eagle1Drafter.from_spec(str(head), DrafterContext(target, None, 1))
    engine = Engine(target, drafter, k=1, prefix_reuse=False)
    tried = accepted = 0
    for sample in texts:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        result = engine.generate([sample.ids[: sample.prompt_length]], params)[0]
        assert result.prompt_ids + result.token_ids == sample.ids
        tried += result.stats.num_draft_tokens
        accepted += result.stats.num_accepted_draft_tokens
    assert accepted / tried == pytest.approx(alpha[0], abs=0.12)


@torch.no_grad()
def test_training_starts_from_the_best_linear_head(target: Decoder, data: Path) -> None:  # noqa: F811
    start, blind = (task(target, data, Eagle1Training(), fresh) for fresh in (True, False))
    texts = samples(data)
    assert parts_of_the_loss(start, texts)[0] < parts_of_the_loss(blind, texts)[0] - 0.05


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_train_eagle1 as own
from foredraft.models.loading import load_model
target = load_model(Path({folder!r}), dtype="float32", device="cpu").target
run = own.trainer(target, Path({data!r}), Path({out!r}))
def stop(measure):
    if measure.step >= 9:
        os.kill(os.getpid(), signal.SIGKILL)
run.run(stop)
"""


def test_a_killed_run_goes_on_to_the_same_bits(
    target: Decoder,  # noqa: F811
    folder: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    whole = trainer(target, data, tmp_path / "whole")
    expected = whole.run()
    out = tmp_path / "killed"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder), data=str(data), out=str(out))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    resumed = trainer(target, data, out)
    assert resumed.progress.step == 8
    found = resumed.run()
    assert [(m.step, m.loss, m.alpha, m.overlap) for m in found] == [
        (m.step, m.loss, m.alpha, m.overlap) for m in expected
    ]
    left, right = (load_checkpoint(run.checkpoint)[0] for run in (whole, resumed))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_bfloat16_training_learns_too(target: Decoder, data: Path, tmp_path: Path) -> None:  # noqa: F811
    losses = {}
    for precision in ("float32", "bfloat16"):
        options = {"lr": 1e-2, "noise": 0.0, "token_weight": 1.0, "precision": precision}
        run = trainer(target, data, tmp_path / precision, steps=60, batch=4, **options)
        assert isinstance(run.task, Eagle1Task)
        before = parts_of_the_loss(run.task, samples(data)[:16])
        run.run()
        after = losses[precision] = parts_of_the_loss(run.task, samples(data)[:16])
        assert after[0] < before[0]
        assert after[1] < before[1]
        assert all(value.dtype == torch.float32 for value in run.task.parameters.values())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.2)


def test_a_checkpoint_of_other_sizes_is_refused(target: Decoder, data: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer(target, data, tmp_path, steps=4).run()
    (tmp_path / "again").mkdir()
    run = eagle3.trainer(target, data, tmp_path / "again", steps=4)
    run.run()
    run.checkpoint.rename(tmp_path / "checkpoint.safetensors")
    with pytest.raises(ConfigError, match="belongs to a run of other sizes"):
        trainer(target, data, tmp_path)


@pytest.fixture(scope="module")
def good(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A head that was trained on what the check itself will ask for, so that it accepts something."""
    out = tmp_path_factory.mktemp("good")
    own = target.shape
    engine = Engine(target, Recorder((own.layers,)), k=0, prefix_reuse=False)
    params = SamplingParams(max_tokens=check_parts.TOKENS)
    tasks = [Task(2 + n, [1 + n] * 4, params) for n in range(len(check_parts.PROMPTS))]
    list(record(engine, tasks, out / "data"))
    options = {"lr": 1e-2, "batch": 4, "noise": 0.0, "token_weight": 1.0}
    config = Eagle1Training(steps=150, measure_every=150, save_every=150, **options)
    return train_eagle1(loaded(target), out / "data", out / "run", config)


def damaged(good: Path, out: Path, config: dict[str, object], **tensors: torch.Tensor | None) -> Path:
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(json.loads((good / "config.json").read_text()) | config))
    kept = load_file(good / "model.safetensors") | tensors
    save_file({n: v.contiguous() for n, v in kept.items() if v is not None}, out / "model.safetensors")
    return out


def test_the_linter_passes_a_good_head(target: Decoder, good: Path) -> None:  # noqa: F811
    report = check.check_head(good, loaded(target))
    assert report.findings == []
    assert report.tau > 1.5
    assert len(report.alpha) == check_parts.CHAIN


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"bias": True}, {}, "bias is true in config.json, but fc.bias is not in the file"),
        ({}, {"layers.0.mlp.up_proj.weight": torch.full((96, 64), torch.nan)}, "holds NaN"),
        ({}, {"layers.0.mlp.up_proj.weight": None}, "up_proj.weight is missing"),
        ({}, {"embed_tokens.weight": torch.randn(101, 64)}, "embed_tokens is not the target's embedding"),
        ({"num_hidden_layers": 3}, {}, "num_hidden_layers: must be 1"),
    ],
)
def test_the_linter_names_broken_files(
    target: Decoder,  # noqa: F811
    good: Path,
    tmp_path: Path,
    config: dict[str, object],
    tensors: dict[str, torch.Tensor | None],
    said: str,
) -> None:
    report = check.check_head(damaged(good, tmp_path, config, **tensors), loaded(target))
    assert report.broken
    assert any(said in line for line in report.lines()), report.lines()


def test_the_linter_names_swapped_halves(target: Decoder, good: Path, tmp_path: Path) -> None:  # noqa: F811
    weight = load_file(good / "model.safetensors")["fc.weight"]
    swapped = torch.cat([weight[:, 64:], weight[:, :64]], 1)
    report = check.check_head(damaged(good, tmp_path, {}, **{"fc.weight": swapped}), loaded(target))
    assert any("fc reads the feature first" in line for line in report.lines()), report.lines()


def test_export_says_that_nothing_is_to_be_exported(good: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="give vLLM the folder itself"):
        export_head(good, tmp_path / "out", Verifier("tiny"))
