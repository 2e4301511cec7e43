"""Whatever the head says, the text is the target's: greedy identity, seeds, the law, prefixes, batches, failures."""

from __future__ import annotations

import dataclasses
from typing import Any

import eagle_support as support
import models_support
import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters import eagle
from foredraft.drafters.base import DrafterContext, DraftRequest
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_checkpoint import build_head
from foredraft.drafters.eagle_head import EagleHead, HeadSegment
from foredraft.drafters.eagle_step import CompiledStep
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.errors import ConfigError, VocabularyMismatchError
from foredraft.kernels import available
from foredraft.models.decoder import Decoder
from foredraft.sampling import RequestSampler
from foredraft.testing.stats import two_sample
from foredraft.train.eagle_net import EagleNet


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = models_support.make_hf("llama")
    found: Decoder = models_support.save_and_load(model, tmp_path_factory.mktemp("llama"))
    return found


def head_for(target: Any, seed: int = 0, draft_vocab: int = 40, table: bool = False) -> EagleHead:
    """A head with random weights, which guesses right now and then. With a table whole drafts are one call."""
    own = target.shape
    torch.manual_seed(seed)
    shape = support.shape(
        taps=(0, 1, own.layers),
        target_hidden=own.hidden_size,
        hidden=own.hidden_size,
        vocab=own.vocab_size,
        draft_vocab=draft_vocab,
    )
    ids = torch.arange(draft_vocab) * 2
    return build_head(shape, EagleNet(shape).state(), ids, target.embed, 32, target.embedding_rows if table else None)


PROMPTS = [models_support.random_tokens(n, seed=n) for n in (1, 3, 40, 9)]


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("compiled", [True, False])
def test_greedy_text_is_the_targets(target: Decoder, k: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(CompiledStep, "make", lambda *_: None)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = Engine(target).generate(PROMPTS, params)
    drafted = Engine(target, Eagle3Drafter(head_for(target)), k=k, max_step_tokens=16).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_tokens > 0 for r in drafted)


def test_requests_that_draft_in_different_ways_share_a_batch(target: Decoder) -> None:
    """Likeliest tokens in one call, drawn ones and those under controls step by step; each text is what it is alone."""
    asked = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=5),
        SamplingParams(max_tokens=16, ignore_eos=True, frequency_penalty=1.0),
        SamplingParams(max_tokens=16, ignore_eos=True),
    ]
    plain = [Engine(target).generate([ids], params)[0] for ids, params in zip(PROMPTS, asked, strict=True)]
    drafted = Engine(target, Eagle3Drafter(head_for(target)), k=4).generate(PROMPTS, asked)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_tokens > 0 for r in drafted)


def test_the_calls_of_a_greedy_request_draft_what_its_draws_would(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    quick = Engine(target, Eagle3Drafter(head_for(target)), k=4).generate(PROMPTS, params)
    monkeypatch.setattr(RequestSampler, "ahead", lambda *_: None)
    slow = Engine(target, Eagle3Drafter(head_for(target)), k=4).generate(PROMPTS, params)
    assert [r.stats.trace for r in quick] == [r.stats.trace for r in slow]


def test_a_head_of_nonsense_costs_its_requests_nothing_but_drafts(target: Decoder) -> None:
    head = head_for(target)
    head.weights.final_norm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    head = EagleHead(head.shape, head.weights, head.embed)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drafted = Engine(target, Eagle3Drafter(head), k=3).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in Engine(target).generate(PROMPTS, params)]
    assert all(r.stats.num_draft_tokens == 0 for r in drafted)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_seed_gives_the_text_of_plain_decoding(target: Decoder, at_once: bool) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, seed=5, ignore_eos=True)
    plain = Engine(target).generate(PROMPTS, params)
    drafted = Engine(target, Eagle3Drafter(head_for(target, table=at_once)), k=4).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted_draft_tokens for r in drafted) > 0


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_law_is_the_targets(target: Decoder, verify: str, at_once: bool) -> None:
    params = SamplingParams(temperature=1.0, top_k=4, max_tokens=3, ignore_eos=True)
    counts = []
    head = head_for(target, draft_vocab=50, table=at_once)
    assert head.draws == (at_once and available())
    for drafter in (None, Eagle3Drafter(head)):
        engine = Engine(target, drafter, k=2, verify=verify, max_batch=16)
        texts = [r.token_ids for r in engine.generate([PROMPTS[1]] * 1200, params)]
        counts.append(texts)
    kinds = sorted({tuple(text) for texts in counts for text in texts})
    table = [[float(texts.count(list(kind))) for kind in kinds] for texts in counts]
    assert two_sample(*table).p_value > 1e-4


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_outlook_is_the_heads_own_only_where_it_learns_from_its_drafts(
    target: Decoder, at_once: bool, temperature: float
) -> None:
    """A head that is asked for each token does not tell how sure it was: there the engine judges by acceptance."""
    drafter = Eagle3Drafter(head_for(target, table=at_once))
    seen: list[tuple[bool, int]] = []
    ask = drafter.outlook

    def outlook(request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        found = ask(request, limit, price)
        seen.append((found is not None, sum(rate.tries > 0 for rate in drafter._texts[request.id].foresight._grades)))
        return found

    drafter.outlook = outlook  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    Engine(target, drafter, max_k=4).generate([PROMPTS[1]], params)
    own = temperature == 0 or drafter.head.draws
    assert {foreseen for foreseen, _ in seen} == {own}
    assert (seen[-1][1] > 0) == own


def test_a_head_that_has_read_the_text_in_parts_drafts_the_same(target: Decoder) -> None:
    """Prefixes of finished requests are reused by the target; the head's own keys must follow."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = PROMPTS[2]
    cold = Engine(target, Eagle3Drafter(head_for(target)), k=3, prefix_reuse=False)
    warm = Engine(target, Eagle3Drafter(head_for(target)), k=3)
    answer = cold.generate([first], params)[0].token_ids
    warm.generate([first], params)
    longer = first + answer[:6] + [7, 8, 9]
    fresh, reused = cold.generate([longer], params)[0], warm.generate([longer], params)[0]
    assert reused.usage.cached_tokens > len(first)
    assert reused.token_ids == fresh.token_ids
    assert reused.stats.trace == fresh.stats.trace


def test_a_third_turn_knows_the_first(target: Decoder) -> None:
    """What the head had not read when a turn ended is a gap in its keys, not the end of them."""
    drafter = Eagle3Drafter(head_for(target))
    engine, text = Engine(target, drafter, k=3), PROMPTS[2]
    for turn in range(3):
        result = engine.generate([text], SamplingParams(max_tokens=12, ignore_eos=True), tenant="a")[0]
        text = [*text, *result.token_ids, 7 + turn, 8]
    known = len(text) - 5
    state = drafter._start(_Asked(text, "a"), known)  # type: ignore[arg-type]
    assert state.position == known
    assert len(PROMPTS[2]) < known - 3 * 5 <= state.length <= known


@pytest.mark.parametrize("k", [0, 3])
def test_a_long_text_is_seen_through_a_window(target: Decoder, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Memory and drafts cost no more with the text's length, and the text is the target's."""
    monkeypatch.setattr(eagle, "WINDOW", 16)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    drafter = Eagle3Drafter(head_for(target))
    most = []
    observe = drafter.observe

    def watch(request: Any, *rest: Any) -> None:
        observe(request, *rest)
        text = drafter._texts[request.id]
        waiting = sum(part.shape[0] for part in text.waiting)
        assert text.rows == waiting
        most.append((waiting, text.state.length if text.state else 0, text.state.position if text.state else 0))
        if text.state is not None:
            assert text.state.position + waiting == len(request.ids) - 1

    monkeypatch.setattr(drafter, "observe", watch)
    drafted = Engine(target, drafter, k=3, max_step_tokens=16).generate(
        PROMPTS, params, speculation=SpeculationConfig(k=k)
    )
    assert [r.token_ids for r in drafted] == [r.token_ids for r in Engine(target).generate(PROMPTS, params)]
    waiting, length, position = (max(column) for column in zip(*most, strict=True))
    assert position > 60
    assert waiting <= 2 * 16
    assert length <= 2 * 16
    assert length > 16 if k else length == 0


def test_the_window_forgets_the_oldest_rows(target: Decoder) -> None:
    """A state that forgot what a shorter one never read drafts the same."""
    head = head_for(target)
    taps = torch.randn(30, 3, target.shape.hidden_size, generator=torch.Generator().manual_seed(3))
    ids = models_support.random_tokens(31, seed=3)
    whole, last = head.new_state(), head.new_state()
    head.step([HeadSegment(whole, ids[1:31], taps, logits_from=30)])
    whole.commit(30)
    whole.forget(12)
    last.skip(18)
    head.step([HeadSegment(last, ids[19:31], taps[18:], logits_from=12)])
    last.commit(12)
    assert (whole.length, whole.position) == (last.length, last.position) == (12, 30)
    assert [whole.before(n) for n in (0, 18, 20, 40)] == [0, 0, 2, 12]
    again = whole.copy(2, head.shape)
    assert (again.length, again.position) == (2, 20)
    logits, _ = head.step([HeadSegment(state, [5], taps[:1]) for state in (whole, last)])
    assert torch.equal(*logits)


def test_another_tenants_text_is_not_reused(target: Decoder) -> None:
    drafter = Eagle3Drafter(head_for(target))
    engine = Engine(target, drafter, k=3)
    engine.generate([PROMPTS[2]], SamplingParams(max_tokens=4), tenant="a")
    state = drafter._start(_Asked(PROMPTS[2], "b"), 20)  # type: ignore[arg-type]
    assert (state.length, state.position) == (0, 20)
    state = drafter._start(_Asked(PROMPTS[2], "a"), 20)  # type: ignore[arg-type]
    assert (state.length, state.position) == (20, 20)
    drafter.reset()
    assert drafter._start(_Asked(PROMPTS[2], "a"), 20).length == 0  # type: ignore[arg-type]


@dataclasses.dataclass
class _Asked:
    ids: list[int]
    tenant: str


def test_tokens_that_the_head_cannot_propose_end_the_draft(target: Decoder) -> None:
    params = SamplingParams(max_tokens=8, allowed_token_ids=(1, 3, 5), ignore_eos=True)  # all outside its vocabulary
    plain = Engine(target).generate(PROMPTS, params)
    drafted = Engine(target, Eagle3Drafter(head_for(target)), k=3).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_tokens == 0 for r in drafted)


def test_a_head_of_another_target_is_refused(target: Decoder) -> None:
    head = head_for(target)
    head.shape = dataclasses.replace(head.shape, vocab=7)
    with pytest.raises(VocabularyMismatchError, match="made for a target of vocabulary 7"):
        Engine(target, Eagle3Drafter(head))


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("", ("", 4)),
        ("my/head", ("my/head", 4)),
        ("bits=8", ("", 8)),
        ("my/head,bits=32", ("my/head", 32)),
        ("orbits=8", ("orbits=8", 4)),
    ],
)
def test_how_many_bits_are_kept_can_be_asked_for(argument: str, found: tuple[str, int]) -> None:
    assert eagle._bits(argument) == found


@pytest.mark.parametrize("argument", ["bits=5", "my/head,bits=", "bits=eight"])
def test_other_numbers_of_bits_are_refused(argument: str, target: Decoder) -> None:
    with pytest.raises(ConfigError, match="bits must be 4, 8 or 32"):
        Eagle3Drafter.from_spec(argument, DrafterContext(target, None))
