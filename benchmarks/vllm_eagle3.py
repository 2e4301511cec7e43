"""The embedded EAGLE-3 head in vLLM and here: acceptance on the same prompts, weights and number type.

vLLM runs as its users run it: ``foredraft serve --engine vllm`` starts it, its answers come over HTTP, its counters
from ``/metrics``. Both sides read the same dense weights in float32 and decode greedily with a fixed draft length.
vLLM counts steps that drafted only, so mean acceptance lengths (1 + accepted / such steps) are compared. Results go to
``results/vllm-eagle3.json``, a part a draft length, with lines of vLLM's log.

    foredraft bench --install            # once: vLLM's CPU build, in an environment of its own
    python benchmarks/vllm_eagle3.py [--prompts 12] [--tokens 64] [--k 3]

Times are not recorded: vLLM runs without its compiler here (``--enforce-eager``), which would take minutes to start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from record import Record

from foredraft import Engine, SamplingParams
from foredraft.bench.counters import Acceptance, fetch
from foredraft.bench.environments import ready
from foredraft.bench.weights import dense_folder
from foredraft.bench.workloads import mix
from foredraft.models.loading import load_model
from foredraft.scaleout.process import free_port

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
KEPT = re.compile(r"version \d|Loading drafter|EAGLE model|auxiliary layers|SpecDecoding metrics|shutdown")
"""Lines of vLLM's log that are kept."""


class Vllm:
    """vLLM's server, as ``foredraft serve --engine vllm`` starts it."""

    def __init__(self, folder: Path, drafter: str, k: int, threads: int, log: Path) -> None:
        port = free_port("127.0.0.1")
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = ["serve", "--engine", "vllm", "--target", str(folder), "--drafter", drafter, "--k", str(k)]
        words += ["--dtype", "float32", "--max-context", "1024", "--max-batch", "4", "--port", str(port)]
        words += ["--drain-timeout", "20", "--vllm-arg=--enforce-eager", "--no-prefix-reuse"]
        settings = CPU | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "foredraft", *words], stderr=out, env=os.environ | settings
            )

    def wait(self, seconds: float) -> None:
        """Until the line that says so is in the log."""
        for _ in range(int(seconds)):
            if "by vLLM on" in self.log.read_text(errors="replace"):
                return
            if self.process.poll() is not None:
                break
            time.sleep(1)
        self.end()
        raise SystemExit(f"vLLM did not start; its log: {self.log}")

    def counts(self) -> Acceptance:
        """All counters so far."""
        return sum(fetch(self.url).values(), Acceptance())

    def complete(self, ids: list[int], tokens: int) -> list[int]:
        """Greedy continuation, as token ids."""
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=600) as reply:
            return list(json.load(reply)["choices"][0]["token_ids"])

    def end(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def excerpt(self, folders: dict[str, str]) -> list[str]:
        """The lines that say what was loaded and what came out, without colours, times and folders."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            line = re.sub(r"\x1b\[[0-9;]*m", "", line)
            if KEPT.search(line) or line.startswith(("starting vLLM", "serving ")):
                for folder, name in folders.items():
                    line = line.replace(folder, name)
                line = re.sub(r"^\((\w+) pid=\d+\) ", r"(\1) ", line)
                found.append(re.sub(r"(INFO|WARNING) \S+ \S+ ", r"\1 ", line))
        return found


def ours(folder: Path, drafter: str, k: int, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], Any]:
    """Texts and pooled statistics of foredraft itself."""
    engine = Engine(load_model(folder, dtype="float32"), drafter, k=k, prefix_reuse=False)
    texts = [engine.generate([ids], SamplingParams(max_tokens=tokens))[0].token_ids for ids in prompts]
    return texts, engine.stats


def compare(record: Record, options: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides."""
    folder = dense_folder("smollm2-135m", print)
    head = f":{options.head}" if options.head else ""
    tokenizer = load_model(folder, dtype="float32").tokenizer
    assert tokenizer is not None
    chosen = mix(options.prompts)
    prompts = [tokenizer.chat(prompt.messages) for prompt in chosen]
    log = Path(tempfile.gettempdir()) / "foredraft-vllm-eagle3.log"
    server = Vllm(folder, f"eagle3{head}", options.k, options.threads, log)
    try:
        server.wait(options.patience)
        before = server.counts()
        texts = [server.complete(ids, options.tokens) for ids in prompts]
        time.sleep(1)  # its counters follow its answers
        theirs = server.counts().since(before)
    finally:
        code = server.end()
    own_texts, stats = ours(folder, f"eagle3{head}", options.k, prompts, options.tokens)
    steps = stats.num_spec_steps
    figures = {
        "vllm": theirs.to_dict(),
        "foredraft": {
            "num_spec_steps": steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "acceptance_rate_per_position": [n / steps for n in stats.accepted_per_position()],
        },
        "ratio_of_mean_acceptance_lengths": (theirs.tau or 0) / (stats.mean_acceptance_length or 1),
        "prompts": [prompt.id for prompt in chosen],
        "same_text": sum(a == b for a, b in zip(texts, own_texts, strict=True)),
        "exit_code_after_sigterm": code,
        "log": server.excerpt({str(folder): "SMOLLM2-BF16", str(Path.home()): "~", str(Path.cwd()): "."}),
    }
    record.put(f"k={options.k}", figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--head", default="", help="folder of another head")
    parser.add_argument("--patience", type=float, default=600, help="seconds for vLLM to start")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    if not ready("vllm"):
        raise SystemExit("vLLM's environment is not here; make it with: foredraft bench --install")
    record = Record("vllm-eagle3", options.fresh)
    record.data["settings"] = {
        name: value for name, value in vars(options).items() if name not in ("k", "fresh", "head")
    }
    figures = compare(record, options)
    print(json.dumps({name: figures[name] for name in ("vllm", "foredraft")}, indent=1))
    print("ratio", figures["ratio_of_mean_acceptance_lengths"], "same text", figures["same_text"])


if __name__ == "__main__":
    main()
