"""A target split over processes: the same bits as one process, whatever is drafted; clear words when a process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import FAMILIES, fresh, make_hf, random_tokens
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from foredraft import Engine, SamplingParams
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError, RequestFailedError, UnsupportedModelError
from foredraft.models import loading, parallel_launch
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.models.linear import dense_linear
from foredraft.models.packed import packed_linear
from foredraft.models.parallel import ParallelBuilder, ParallelDecoder
from foredraft.models.parallel_group import Group, split

LOAD: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cache_bytes": 1 << 26}
SPLIT = ["llama", "llama_bias_untied", "qwen3", "gemma2", "gemma3", "qwen2_moe", "mixtral_window"]


WIDE = {"intermediate_size": 200, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 136}


def folder(family: str, tmp_path: Path) -> Path:
    """A tiny model with inner widths that two processes can share."""
    prefix, changes = FAMILIES[family]
    wide = {key: value for key, value in WIDE.items() if key in changes or key == "intermediate_size"}
    FAMILIES["wide"] = (prefix, {**changes, **wide})
    try:
        make_hf("wide").save_pretrained(tmp_path / family)
    finally:
        del FAMILIES["wide"]
    return tmp_path / family


def in_threads(path: Path, linear: Any, size: int = 2, dtype: torch.dtype = torch.float32) -> ParallelDecoder:
    """Rank 0's share; the others follow in threads of this process, over real sockets."""
    parts, cpu = loading._open(path), torch.device("cpu")
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)

    def share(rank: int) -> ParallelDecoder:
        group = Group(rank, size, cpu)
        return ParallelDecoder.build(ParallelBuilder(parts.source(), parts.shape, dtype, cpu, linear, group), group)  # type: ignore[arg-type]

    def live(decoder: ParallelDecoder) -> None:
        decoder.group.connect(TCPStore("127.0.0.1", store.port, 1, is_master=False), True, 60)
        decoder.follow()

    for rank in range(1, size):
        threading.Thread(target=live, args=(share(rank),), daemon=True).start()
    first = share(0)
    first.group.connect(store, True, 60)
    return first


@pytest.mark.parametrize("family", SPLIT)
def test_the_bits_are_those_of_one_process(family: str, tmp_path: Path) -> None:
    """Packed products, whose sums have one order: prompt, single tokens, a tree, a commit of its path, a roll back."""
    path = folder(family, tmp_path)
    one = loading.load_model(path, make_linear=packed_linear("float32"), **LOAD).target
    assert type(one) is Decoder
    two = in_threads(path, packed_linear("float32"))
    answers = []
    for target in (one, two):
        cache, found = target.cache, []
        a, b = cache.allocate(), cache.allocate()
        out = target.forward([Segment(a, random_tokens(20)), Segment(b, random_tokens(3, 1), 3)], taps=(0, 1))
        found += [*out.logits, *out.taps]
        cache.commit(a, 18)
        cache.commit(b, 3)
        tree = Segment(a, [5, 6, 7, 8], 0, [-1, 0, 0, 2])
        out = target.forward([tree, Segment(b, [9])])
        found += out.logits
        cache.commit(a, [0, 2, 3])
        cache.commit(b, 0)
        cache.rollback(b, 1)
        out = target.forward([Segment(a, [11, 12]), Segment(b, random_tokens(40, 2), 38)])
        found += out.logits
        cache.commit(a, 2)
        cache.commit(b, 40)
        cache.free(a)
        found += target.forward([Segment(cache.allocate(), [3, 4])]).logits
        answers.append(found)
    for whole, parted in zip(*answers, strict=True):
        assert torch.equal(whole, parted)
    two.end()


@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (2, "gemma2"), (2, "llama_wide_heads")])
def test_dense_products_differ_by_rounding_alone(size: int, family: str, tmp_path: Path) -> None:
    """torch may sum a smaller matrix in another order; in float64 that is far below any gap between logits."""
    path = folder(family, tmp_path)
    one = loading.load_model(path, make_linear=dense_linear, **{**LOAD, "dtype": "float64"}).target
    two = in_threads(path, dense_linear, size, torch.float64)
    tokens = random_tokens(30)
    assert torch.allclose(fresh(one, tokens), fresh(two, tokens), rtol=0, atol=1e-10)
    two.end()


def test_uneven_shares() -> None:
    assert split(3, 2) == [2, 1]
    assert split(576, 2, 64) == [320, 256]
    assert split(101, 3, 16) == [32, 32, 37]
    assert split(5, 4) == [2, 1, 1, 1]


def test_three_processes_with_three_heads(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=24, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    one = loading.load_model(tmp_path / "m", make_linear=packed_linear("float32"), **LOAD).target
    tokens = random_tokens(20)
    for size in (2, 3):
        parted = in_threads(tmp_path / "m", packed_linear("float32"), size)
        assert torch.equal(fresh(one, tokens), fresh(parted, tokens))
        assert parted.cache.bytes_per_token < one.cache.bytes_per_token  # type: ignore[attr-defined]
        parted.end()
    with pytest.raises(ConfigError, match=r"4 processes for 3 heads.*use at most 3"):
        loading.load_model(tmp_path / "m", tensor_parallel=4, **LOAD)


# --- real processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def two(model: Path) -> LoadedModel:
    return loading.load_model(model, tensor_parallel=2, **LOAD)


@pytest.fixture(scope="module")
def one(model: Path) -> LoadedModel:
    return loading.load_model(model, make_linear=packed_linear("float32"), **LOAD)


PROMPTS = [random_tokens(30), random_tokens(4, 5), [7, 8, 9] * 30]


@pytest.mark.parametrize("drafter", [None, "lookup", "suffix", "lookup-tree", "early-exit:2"])
def test_two_processes_write_the_text_of_one(drafter: str | None, two: LoadedModel, one: LoadedModel) -> None:
    """Greedy and seeded, in one batch, with prompts read in chunks between other requests' drafts."""
    params = [
        SamplingParams(max_tokens=30, temperature=t, seed=seed, ignore_eos=True)
        for t, seed in ((0, None), (1, 3), (0, 1))
    ]
    whole = Engine(one, max_step_tokens=16).generate(PROMPTS, params)
    engine = Engine(two, drafter, k=4, max_step_tokens=16, prefix_reuse=False)
    parted = engine.generate(PROMPTS, params)
    assert [r.token_ids for r in parted] == [r.token_ids for r in whole]
    if drafter is not None:
        assert sum(r.stats.num_draft_tokens for r in parted) > 0


def test_a_full_cache_leaves_both_processes_in_step(two: LoadedModel, one: LoadedModel) -> None:
    """Rank 0 refuses before the other hears of it."""
    cache = two.target.cache
    budget, cache.budget = cache.budget, 70 * cache.bytes_per_token  # type: ignore[attr-defined]
    try:
        results = Engine(two, "lookup", k=3, prefix_reuse=False).generate(
            PROMPTS[:2], SamplingParams(max_tokens=30), raise_errors=False
        )
    finally:
        cache.budget = budget  # type: ignore[attr-defined]
    want = Engine(one).generate(PROMPTS[:2], SamplingParams(max_tokens=30))
    assert [r.error for r in results] == [None, None]
    assert [r.token_ids for r in results] == [r.token_ids for r in want]


def test_what_needs_the_weights_themselves_is_refused(two: LoadedModel) -> None:
    assert isinstance(two.target, ParallelDecoder)
    with pytest.raises(UnsupportedModelError, match="split over processes"):
        two.target.head(torch.zeros(1, 64))
    with pytest.raises(UnsupportedModelError, match="cannot be trained"):
        two.target.full(torch.zeros(1, 2, dtype=torch.int64))
    assert two.target.logits(torch.zeros(2, 64)).shape == (2, 101)
    assert two.target.embed(torch.tensor([1, 2])).shape == (2, 64)


def children() -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [int(line.split()[0]) for line in out.stdout.splitlines() if "parallel_worker" in line]


def test_a_dead_process_is_an_error_and_no_hang(model: Path) -> None:
    before = set(children())
    loaded = loading.load_model(model, tensor_parallel=2, **LOAD)
    [child] = set(children()) - before
    engine = Engine(loaded, "lookup", k=3)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(5):
        engine.step()
    os.kill(child, signal.SIGKILL)
    started = time.monotonic()
    while not request.finished:
        engine.step()
    assert time.monotonic() - started < 30
    assert isinstance(request.error, ForedraftError)
    assert "process 1 ended with signal 9" in str(request.error)
    assert "load the model again" in str(request.error)
    with pytest.raises(RequestFailedError, match="tensor_parallel"):
        engine.generate([[1, 2]], SamplingParams(max_tokens=3))


def test_a_process_that_cannot_load_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel_launch.load_share

    def wrong(size: int, options: dict[str, Any], build: Any) -> Any:
        return right(size, {**options, "spec": str(model / "nothing")}, build)

    monkeypatch.setattr(parallel_launch, "load_share", wrong)
    with pytest.raises(ModelLoadError, match=r"process 1 ended with code 1: .*nothing"):
        loading.load_model(model, tensor_parallel=2, **LOAD)


def test_what_cannot_be_split_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: must be at least 1"):
        loading.load_model(model, tensor_parallel=0, **LOAD)
    with pytest.raises(ConfigError, match="takes no products of your own"):
        loading.load_model(model, tensor_parallel=2, make_linear=dense_linear, **LOAD)
    with pytest.raises(ConfigError, match="loaded already"):
        Engine(loading.load_model(model, **LOAD), tensor_parallel=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="torchrun started 4 processes; give 4"):
        loading.load_model(model, tensor_parallel=2, **LOAD)


SCRIPT = """
import sys
from foredraft import Engine, SamplingParams
engine = Engine(sys.argv[1], "lookup", tensor_parallel=2, dtype="float32", device="cpu")
print(engine.generate([[7, 8, 9] * 5], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids, flush=True)
"""


@pytest.mark.parametrize("start", ["alone", "torchrun"])
def test_a_script_ends_with_all_its_processes(start: str, model: Path, one: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(torchrun if start == "torchrun" else []), str(tmp_path / "script.py"), str(model)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    want = Engine(one).generate([[7, 8, 9] * 5], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    assert done.stdout.strip() == str(want)


@pytest.mark.real_model
def test_the_command_writes_smollm2s_text_in_two_processes() -> None:
    """Packed 4-bit weights, three heads of keys and values in shares of two and one."""
    command = [sys.executable, "-m", "foredraft", "generate", "Repeat: apples, pears, apples, pears, apples,", "--json"]
    command += ["--max-tokens", "16", "--dtype", "float32", "--device", "cpu", "--drafter", "lookup", "--k", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    texts = []
    for extra in ([], ["--tensor-parallel", "2"]):
        done = subprocess.run(command + extra, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout))
    assert texts[0]["token_ids"] == texts[1]["token_ids"]
    assert texts[1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
