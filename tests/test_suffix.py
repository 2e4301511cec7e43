"""Suffix decoding: plain text whatever is copied, nothing of another tenant, memory within its bound."""

from __future__ import annotations

import gc
import json
import os
import random
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import V, model, plain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters import SuffixDrafter, create
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.outlook import StepPrice
from foredraft.drafters.suffix_pool import SuffixPool
from foredraft.errors import ConfigError
from foredraft.models.catalog import resolve
from foredraft.testing import TableModel

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1], list(range(V)) * 3]
PARAMS = SamplingParams(max_tokens=40)


def context(vocab: int = V) -> DrafterContext:
    return DrafterContext(model(vocab=vocab), None)


class Ended:
    """A request of which only the ids matter."""

    def __init__(self, ids: Sequence[int], tenant: str = "", name: str = "r") -> None:
        self.id, self.ids, self.tenant, self.prompt_length = name, list(ids), tenant, 0
        self.sampler: Any = None


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8, "auto"])
@pytest.mark.parametrize("spec", ["suffix", "suffix:depth=2,factor=4,min_prob=0", "suffix:pool=0,tree"])
def test_greedy_is_plain_cold_and_warm(spec: str, k: int | str) -> None:
    engine = Engine(target=model(), drafter=spec, k=k)  # type: ignore[arg-type]
    want = [plain(p, PARAMS) for p in PROMPTS]
    for _ in range(3):
        assert [r.token_ids for r in engine.generate(PROMPTS, PARAMS)] == want


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("spec", ["suffix", "suffix:tree,factor=3"])
def test_a_seed_gives_one_text(spec: str, k: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=11)
    engine = Engine(target=model(), drafter=spec, k=k)
    for _ in range(2):
        assert [r.token_ids for r in engine.generate(PROMPTS, params)] == [plain(p, params) for p in PROMPTS]
    assert engine.stats.num_accepted_draft_tokens > 0


def test_a_tree_holds_both_ways_on() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3, 4, 8, 1, 2, 3]
    drafter, request = SuffixDrafter(pool=0, tree=True, factor=4), Ended(text)
    drafter.start(request)
    draft = drafter.propose(request, 5)
    assert {draft.path(row)[:1] for row in range(1, 6)} == {(4,), (6,)}
    reach = drafter.outlook(request, 5, StepPrice(1.0, lambda n: 1.0)).reach
    assert list(reach) == sorted(reach, reverse=True)
    request.ids += [6, 7, 9]
    drafter.observe(request, None, None)
    assert drafter._copying["r"].copy is None


def test_a_warm_pool_is_copied_whole_and_reset_makes_it_cold() -> None:
    """A text without any repetition of its own: cold nothing can be copied, warm everything."""
    target = TableModel(lambda prefix: [float(i == (prefix[-1] + 1) % 200) for i in range(200)], 200)
    engine = Engine(target=target, drafter="suffix", k=8)

    def accepted() -> int:
        return engine.generate([[0]], SamplingParams(max_tokens=60))[0].stats.num_accepted_draft_tokens

    assert accepted() == 0
    assert accepted() > 40
    engine.reset()
    assert accepted() == 0


def test_tenants_never_meet() -> None:
    target = TableModel(lambda prefix: [float(i == (prefix[-1] + 1) % 200) for i in range(200)], 200)
    engine = Engine(target=target, drafter="suffix", k=8)
    for tenant, warm in [("a", False), ("b", False), ("a", True), ("", False), ("b", True)]:
        result = engine.generate([[0]], SamplingParams(max_tokens=60), tenant=tenant)[0]
        assert (result.stats.num_draft_tokens > 0) == warm, tenant


@pytest.mark.parametrize("tenants", [1, 3, 400])
def test_the_pool_keeps_its_bound_and_forgets_the_oldest(tenants: int) -> None:
    pool, rng = SuffixPool(24, 1 << 20), random.Random(0)
    for n in range(500):
        pool.add(str(n % tenants), [rng.randrange(30_000) for _ in range(rng.randrange(100))])
        assert pool.bytes <= pool.max_bytes
    assert pool.bytes == sum(g.bytes for t in pool.tenants() for g in pool.generations(t)) > pool.max_bytes // 2
    pool.add("one", range(5000))  # larger than a generation
    assert pool.bytes <= pool.max_bytes
    if tenants < 400:  # else even a generation is more than its share
        assert pool.generations("one")[-1].tokens[-1] == 4999


def test_a_busy_tenant_does_not_push_out_a_quiet_one() -> None:
    pool = SuffixPool(24, 1 << 20)
    pool.add("quiet", range(300))
    for n in range(200):
        pool.add("busy", range(n * 200, n * 200 + 200))
    assert [list(output) for output in pool.generations("quiet")[0].outputs()] == [list(range(300))]
    first = next(iter(pool.generations("busy")[0].outputs()))
    assert first[0] > 0  # its own oldest are gone


def test_a_piece_longer_than_a_chunk_is_one_output() -> None:
    pool = SuffixPool(24, 1 << 20)
    pool.add("", range(700))
    assert [len(output) for output in pool.generations("")[0].outputs()] == [700]


def test_nothing_is_left_of_ended_and_cancelled_requests() -> None:
    engine = Engine(target=model(), drafter="suffix:pool=0", k=4)
    drafter = engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    stream = engine.stream([1, 2, 3], PARAMS)
    next(stream)
    next(stream)
    stream.close()
    engine.generate(PROMPTS, PARAMS)
    assert not drafter._copying
    assert drafter.pool.bytes == 0


def test_a_long_match_drafts_long_at_once_and_a_short_one_not_at_all() -> None:
    """The price of a row is what one in three accepted tokens would pay for."""
    rng = random.Random(3)
    text = [rng.randrange(50) for _ in range(60)]
    drafter = SuffixDrafter(pool=0)
    long, short = Ended([*text, *text[:30]], name="long"), Ended([1, 2, 3, 4, 5, 1], name="short")
    price = StepPrice(1.0, lambda n: 1.0 + 0.3 * min(n, 1) + 0.05 * n)
    for request in (long, short):
        drafter.start(request)
    assert price.best(drafter.outlook(long, 16, price))[1] == 16
    assert drafter.propose(long, 16).tokens == tuple(text[30:46])
    assert price.best(drafter.outlook(short, 16, price))[1] == 0


@pytest.mark.parametrize("drafter", ["lookup:2,1", "suffix:pool=0"])
def test_matches_that_fail_soon_cost_nothing(drafter: str) -> None:
    """In random text of eight tokens short matches abound and one in eight holds; a drafted row costs half a pass."""
    engine = Engine(target=TableModel(lambda prefix: [0.0] * V, V), drafter=drafter)
    for rows in [*range(1, 40)] * 2:
        engine.controller.passes.observe(rows, 1.0 + 0.5 * (rows - 1))
    engine.controller.passes.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    result = engine.generate([[1]], SamplingParams(max_tokens=300, temperature=1.0, seed=1))[0]
    assert sum(step.drafted for step in result.stats.trace) < 6


@pytest.mark.parametrize(
    "argument",
    ["depth", "depth=", "depth=x", "depth=0", "factor=nan", "min_prob=2", "pool=-1", "no=1", "pool=0,file=x", ","],
)
def test_arguments_that_make_no_sense_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="suffix"):
        create(f"suffix:{argument}", context())


# --- persistence


def filled(path: Path, vocab: int = V) -> SuffixDrafter:
    drafter = SuffixDrafter(file=path)
    drafter.attach(context(vocab))
    drafter.pool.add("a\0", [1, 2, 3])
    drafter.pool.add("ü", [4, 5])
    drafter.pool.add("a\0", [6])
    return drafter


def test_a_pool_survives_in_its_file(tmp_path: Path) -> None:
    drafter = filled(tmp_path / "pool.npz")
    drafter.save()
    assert stat.S_IMODE(os.stat(tmp_path / "pool.npz").st_mode) == 0o600
    again = SuffixDrafter(file=tmp_path / "pool.npz")
    again.attach(context())
    kept = {t: [list(o) for g in again.pool.generations(t) for o in g.outputs()] for t in again.pool.tenants()}
    assert kept == {"a\0": [[1, 2, 3], [6]], "ü": [[4, 5]]}


def test_the_file_is_written_when_the_drafter_goes(tmp_path: Path) -> None:
    drafter = filled(tmp_path / "pool.npz")
    del drafter
    gc.collect()
    assert (tmp_path / "pool.npz").exists()


def test_the_pool_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "pool.npz", vocab=9).save()
    with pytest.raises(ConfigError, match="another tokenizer"):
        SuffixDrafter(file=tmp_path / "pool.npz").attach(context())


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter suffix: .*pool.npz cannot be written"):
        SuffixDrafter(file=tmp_path / "missing" / "pool.npz").attach(context())


def rewritten(path: Path, **changes: Any) -> None:
    with np.load(path, allow_pickle=False) as arrays:
        parts = dict(arrays) | changes
    np.savez(path, **parts)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": np.array([1, 2, 3, 6, 4, V], np.int32)},
        {"tokens": np.array([1, 2, 3, 6, 4, -1], np.int32)},
        {"tokens": np.array([1.5] * 6)},
        {"tokens": np.array([None] * 6, object)},
        {"ends": np.array([3, 2, 6])},
        {"ends": np.array([3, 4, 7])},
        {"ends": np.array([[3], [4], [6]])},
        {"owners": np.array([0, 0, 2], np.int32)},
        {"header": np.zeros(3, np.uint8)},
        {"header": np.frombuffer(b"[]", np.uint8)},
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "pool.npz"
    filled(path).save()
    rewritten(path, **changes)
    with pytest.raises(ConfigError, match=r"pool\.npz is refused"):
        SuffixDrafter(file=path).attach(context())


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "empty", "w") as archive:
        archive.writestr("header.npy", json.dumps({}))
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", bytes(5 << 20))
    for name in ("text", "empty", "bomb"):
        with pytest.raises(ConfigError, match="is refused"):
            SuffixDrafter(file=tmp_path / name, pool=1).attach(context())


# --- the real model

TARGET = "smollm2-135m"


@pytest.mark.real_model
@pytest.mark.skipif(resolve(TARGET) is None, reason=f"run: foredraft models fetch {TARGET}")
@pytest.mark.parametrize("drafter", ["suffix", f"combined:suffix+model:{TARGET}@6"])
def test_the_real_model_writes_plain_text(drafter: str) -> None:
    reference = Engine(TARGET, None, prefix_reuse=False)
    assert reference.tokenizer is not None
    texts = ["Repeat: apples, pears, plums, apples, pears, plums, apples", "List three colours."]
    prompts = [reference.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    engine = Engine(TARGET, drafter)
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)):
        want = [reference.generate([p], params)[0].token_ids for p in prompts]
        for k in (4, "auto"):
            results = engine.generate(prompts, params, speculation=SpeculationConfig(k=k))  # type: ignore[arg-type]
            assert [r.token_ids for r in results] == want
    assert engine.stats.num_accepted_draft_tokens > 0
