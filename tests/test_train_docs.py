"""docs/training.md, followed literally with a tiny model; only the number of steps is smaller."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.cli.main import run
from foredraft.cli.train import read_conversations
from foredraft.drafters.eagle_checkpoint import read_checkpoint
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.models.loading import load_model
from foredraft.train.config import EagleTraining
from foredraft.train.heads import train_eagle3

PAGE = Path(__file__).parent.parent / "docs" / "training.md"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def commands() -> list[str]:
    found = re.findall(r"^\$ ((?:foredraft|torchrun) .+)$", PAGE.read_text("utf-8"), re.M)
    assert len(found) == 13
    return [re.sub(r"--steps \d+", "--steps 12", command) for command in found]


def execute(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command of the page; what it said."""
    program, *argv = shlex.split(command)
    if program == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*start, *argv], env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout + done.stderr
    with pytest.raises(SystemExit) as end:
        run(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 0, (command, out, err)
    return out + err


def make_model(folder: Path) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.vocab_size - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "my-model")
    lines = [f"How do I boil {n} eggs?" for n in range(9)] + ['[{"role": "user", "content": "Hello"}]']
    Path("prompts.jsonl").write_text("\n".join(lines))
    said = [execute(command, capsys) for command in commands()]
    recorded, trained, checked, generated, exported, more, rounded, small, with_small, *rest = said
    trained1, checked1, with_eagle1, together = rest
    assert "answer tokens written to data" in recorded
    assert "head written to run/head" in trained
    assert "acceptance by position" in checked
    assert generated.strip()
    assert "my-model-eagle3: EAGLE-3, 257 of 257 tokens, taps 1, 2, 2" in exported
    assert "head written to more/head" in more
    assert "head written to rounded/head" in rounded
    assert "draft written to small/draft" in small
    assert "head written to run1/head" in trained1
    assert "acceptance by position" in checked1
    assert with_small == with_eagle1 == generated  # greedy text does not depend on the drafter
    assert "head written to run2/head" in together
    config = json.loads(Path("my-model-eagle3/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "my-org/my-model"
    assert Path("run/history.png").stat().st_size > 1000
    history = json.loads(Path("run/history.json").read_text())
    assert history[-1]["step"] == 12
    with pytest.raises(SystemExit):  # the run is complete: it ends at once, with the same head
        run(shlex.split(commands()[1])[1:])
    assert json.loads(Path("run/history.json").read_text()) == history


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"messages": []}', "line 1 holds no messages"),
        ('hello\n[{"content": 1}]', "line 2 holds no messages"),
        ("[1, 2", "line 1 holds no messages"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_conversations(path)


def test_training_without_data_names_the_remedy(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"data: .*no recorded answers; record some with 'foredraft train data'"):
        train_eagle3(load_model(str(tmp_path / "model")), tmp_path, tmp_path / "run", EagleTraining())


def test_a_head_goes_on_from_another_with_the_sizes_of_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), dtype="float32", device="cpu")
    (tmp_path / "prompts.txt").write_text("\n".join(f"How do I boil {n} eggs?" for n in range(9)))
    execute(f"foredraft train data --target {tmp_path}/model --out {tmp_path}/data --max-tokens 40 "
            f"--conversations {tmp_path}/prompts.txt", capsys)  # fmt: skip
    sizes = EagleTraining(steps=4, lr=1e-2, warmup=0, rollout=2, intermediate=40, held_out=1)
    first = train_eagle3(loaded, tmp_path / "data", tmp_path / "first", sizes)
    still = EagleTraining(steps=1, lr=1e-12, warmup=0, held_out=1)
    second = train_eagle3(loaded, tmp_path / "data", tmp_path / "second", still, start=first)
    before, after = (read_checkpoint(head).tensors for head in (first, second))
    assert before.keys() == after.keys()
    assert before["layers.0.mlp.gate_proj.weight"].shape[0] == 40
    for name, value in before.items():
        assert torch.allclose(value.float(), after[name].float(), rtol=0.01, atol=1e-6), name
    with pytest.raises(ConfigError, match="intermediate: is given by the head to start from"):
        train_eagle3(loaded, tmp_path / "data", tmp_path / "third", sizes, start=first)
    with pytest.raises(ModelLoadError, match=r"holds no readable config\.json"):
        train_eagle3(loaded, tmp_path / "data", tmp_path / "third", still, start=tmp_path)


def test_answers_in_the_file_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps(talk * 2) + "\nplain text\n")
    found = read_conversations(path)
    assert [[m["role"] for m in conversation] for conversation in found] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
