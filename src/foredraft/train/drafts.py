"""``foredraft train draft`` as a function: distil a small causal model from the target."""

from __future__ import annotations

import math
from pathlib import Path

from foredraft.errors import ConfigError
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.train.answers import read_answers
from foredraft.train.config import DraftTraining
from foredraft.train.draft import DraftTask
from foredraft.train.heads import Report, check_data, finish
from foredraft.train.loop import Trainer
from foredraft.train.student import make_student, write_student
from foredraft.train.texts import ShardTexts, Texts
from foredraft.train.workers import Workers


def train_draft(
    loaded: LoadedModel,
    out: Path,
    config: DraftTraining,
    *,
    data: Path | None = None,
    answers: Path | None = None,
    report: Report = lambda _: None,
    until: float = math.inf,
    workers: Workers | None = None,
) -> Path:
    """Trains a draft model, or goes on with a run, and writes its best state.

    Args:
        loaded: The target.
        out: Gets ``checkpoint.safetensors``, ``history.json``, ``history.png`` and the finished ``draft`` folder.
        data: Folder of shards that ``foredraft train data`` recorded; or
        answers: a file of conversations with their answers, or of texts, which the target scores.
        until: Time (seconds since the epoch) after which no step is begun.
        workers: The processes that train together; None is this one alone.

    Returns:
        The folder of the model, which ``--drafter model:FOLDER`` takes.

    Raises:
        ConfigError: Neither or both of ``data`` and ``answers``, or there is nothing in them.
    """
    texts = _texts(loaded, data, answers)
    device = loaded.target.device  # type: ignore[attr-defined]
    student = make_student(loaded, config, device)
    trainer = Trainer(DraftTask(loaded, student, config, texts), config, out, workers)
    finish(trainer, report, until)
    if trainer.workers.writes:
        write_student(out / "draft", student.config, trainer.best_weights(), loaded)
    trainer.workers.wait(device)
    return out / "draft"


def _texts(loaded: LoadedModel, data: Path | None, answers: Path | None) -> Texts:
    if (data is None) == (answers is None):
        raise ConfigError(
            "give one of the two: recorded answers or a file of answers", field="data", remedy="use --data or --answers"
        )
    if answers is not None:
        return read_answers(answers, loaded.tokenizer, loaded.target.max_context)
    assert data is not None
    check_data(data)
    return ShardTexts(data, last=loaded.target.shape.layers if isinstance(loaded.target, Decoder) else None)
