"""vLLM itself, where its environment is: it takes our commands, loads our head, accepts what we accept, and drains."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from test_scaleout_docs import PAGE, follow

from foredraft.bench.environments import python_of, ready
from foredraft.bench.weights import dense_folder
from foredraft.bench.workloads import of_category
from foredraft.models import catalog

sys.path.insert(0, str(PAGE.parents[1] / "benchmarks"))

from vllm_eagle3 import CPU, Vllm, ours

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not ready("vllm"), reason="vLLM is not here; make its environment: foredraft bench --install"),
    pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here"),
]
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    validate_parsed_serve_args(parsed)
    sizes = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.data_parallel_size
    print(json.dumps([*sizes, parsed.distributed_executor_backend, parsed.speculative_config, parsed.nnodes]))
"""
TOKENS, K = 40, 3


def test_vllms_own_parser_takes_every_command_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREDRAFT_API_KEYS", raising=False)
    said = follow(tmp_path, Cli(capsys))
    lines = [words[words.index("-m") + 2 :] for words in map(shlex.split, said)]
    environment = {**os.environ, **CPU, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python_of("vllm"), "-c", PARSE], input=json.dumps(lines), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    sizes = [(1, 1, 1), (1, 1, 1), (4, 1, 1), (2, 1, 4), (8, 2, 1), (8, 1, 2), (16, 1, 1)]
    assert [tuple(line[:3]) for line in parsed] == sizes
    assert [line[3] for line in parsed] == [None, None, None, None, "ray", "ray", "mp"]
    assert {line[4]["method"] for line in parsed} == {"eagle3"}
    assert parsed[-1][5] == 2


def test_the_exported_head_drafts_in_vllm_as_it_does_here(tmp_path: Path) -> None:
    folder = dense_folder("smollm2-135m", print)
    chosen = [of_category(category)[0] for category in ("code editing", "mathematics", "multi-turn chat")]
    from foredraft.models.loading import load_model

    tokenizer = load_model(folder, dtype="float32").tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.chat(prompt.messages) for prompt in chosen]
    server = Vllm(folder, "eagle3", K, 1, tmp_path / "log")
    late: list[Any] = []
    try:
        server.wait(500)
        before = server.counts()
        texts = [server.complete(ids, TOKENS) for ids in prompts]
        time.sleep(1)
        theirs = server.counts().since(before)
        draining = threading.Thread(target=lambda: late.append(server.complete(prompts[0], TOKENS)))
        draining.start()
        while not server.counts().levels["running"] and draining.is_alive():
            time.sleep(0.05)
    finally:
        code = server.end()
    draining.join()
    own_texts, stats = ours(folder, "eagle3", K, prompts, TOKENS)
    assert texts == own_texts
    assert late == [texts[0]]  # what ran when the signal came was finished
    assert code == 0
    assert theirs.counts["num_accepted_draft_tokens"] > 20
    assert theirs.tau == pytest.approx(stats.mean_acceptance_length, rel=0.05)
