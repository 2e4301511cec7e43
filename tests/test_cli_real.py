"""The real program on the real small model, in processes of its own, as people and scripts use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from foredraft.cli.demo_prompts import PROMPTS
from foredraft.models import catalog

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here"),
]

FOREDRAFT = [sys.executable, "-m", "foredraft.cli.main"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
COPY = next(prompt.text for prompt in PROMPTS if "copy" in prompt.name)


def start(*argv: str, **pipes: Any) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen([*FOREDRAFT, *argv], text=True, env=ENVIRONMENT, **pipes)


def finish(process: subprocess.Popen[str], given: str | None = None) -> tuple[int, str, str]:
    out, err = process.communicate(given, timeout=240)
    return process.returncode, out, err


def test_drafts_do_not_change_the_text() -> None:
    argv = ("generate", COPY, "--chat", "--max-tokens", "32", "--dtype", "float32", "--json")
    plain_code, plain, _ = finish(start(*argv, "--plain"))
    code, drafted, _ = finish(start(*argv, "--drafter", "lookup", "--k", "4"))
    assert plain_code == code == 0
    ours, theirs = json.loads(drafted), json.loads(plain)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["text"] == theirs["text"] != ""
    assert ours["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert ours["timings"]["load_s"] > 0


def test_chat_over_a_pipe_reuses_its_cache() -> None:
    process = start("chat", "--max-tokens", "12", "--json", stdin=subprocess.PIPE)
    code, out, _ = finish(process, "Name a fruit.\nName another.\n")
    assert code == 0
    first, second = json.loads(out)["turns"]
    assert second["usage"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_a_reader_that_leaves_in_the_middle() -> None:
    process = start("generate", "Once upon a time", "--max-tokens", "200", "--plain")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_ctrl_c_in_the_middle_keeps_the_text() -> None:
    process = start("generate", "Once upon a time", "--max-tokens", "2000", "--ignore-eos", "--plain")
    assert process.stdout is not None
    begun = process.stdout.read(4)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, rest, err = finish(process)
    assert code == 130
    assert len(begun + rest) >= 5
    assert rest.endswith("\n")
    assert err == ""
