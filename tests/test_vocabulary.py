"""Drafters with another tokenizer: the output's law and greedy text are the target's, whichever method drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from vocabulary_support import SPECIAL, TEXT, loaded, reciter, tokenizer

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters import ModelDrafter
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.vocabulary import VocabularyDrafter
from foredraft.errors import ConfigError, VocabularyMismatchError
from foredraft.models.tokenizer import Tokenizer
from foredraft.sampling import draw
from foredraft.sampling.law import TokenLaw
from foredraft.testing import TableModel
from foredraft.testing.fork import Fork, outcomes
from foredraft.testing.law import law_of_drafts, plain_law
from foredraft.types import Draft

METHODS = ["intersection", "text"]
PAIRS = [("bytes", "digits"), ("digits", "pieces"), ("pieces", "bytes"), ("nfc", "bytes"), ("bytes", "bytes")]


def words(kind: str, size: int = 420) -> Tokenizer:
    return tokenizer(kind, size)


def drafter(kind: str, method: str = "auto", size: int = 360, **options: Any) -> VocabularyDrafter:
    there = words(kind, size)
    return VocabularyDrafter(reciter(there, **options), there, method)  # type: ignore[arg-type]


# --- the same text as without


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_greedy_text_is_plains_and_drafts_are_accepted(here: str, there: str, method: str) -> None:
    """The drafter's encoding of the text is longer (340 tokens) or shorter (480) than the target's."""
    target = loaded(reciter(words(here), spread=30), words(here))
    params = SamplingParams(max_tokens=40)
    prompts = [TEXT[:30], "Z"]
    plain = Engine(target=target).generate(prompts, params)
    accepted = []
    for size in (340, 480):
        engine = Engine(target=target, drafter=drafter(there, method, size, wrong=5, padding=7, spread=30), k=4)
        results = engine.generate(prompts, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert all(r.error is None for r in results)
        accepted.append(results[0].metrics["speculative_decoding"]["num_accepted_draft_tokens"])
        inner = engine.drafter
        assert isinstance(inner, VocabularyDrafter)
        assert not inner._views
        assert not inner._states
    assert max(accepted) > (10 if method == "text" else 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_right_text_in_the_right_tokens_is_accepted_whole(method: str) -> None:
    target = loaded(reciter(words("bytes"), spread=30), words("bytes"))
    engine = Engine(target=target, drafter=drafter("bytes", method, 420, spread=30), k=4)
    result = engine.generate(TEXT[:31], SamplingParams(max_tokens=60))[0]
    assert result.metrics["speculative_decoding"]["draft_acceptance_rate"] > 0.97
    assert (TEXT + TEXT).startswith(TEXT[:31] + result.text)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[4], [0, 3], [1, 0, 0, 5, 2]])
def test_alternating_lengths_and_seeds(method: str, lengths: list[int]) -> None:
    """Case 8; and a seed gives one text, whatever drafts."""
    target = loaded(reciter(words("digits"), wrong=7, spread=5), words("digits"))
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.0, seed=5, top_p=0.9)):
        plain = Engine(target=target).generate(TEXT[:20], params)[0].token_ids
        engine = Engine(target=target, drafter=drafter("pieces", method, wrong=5, spread=2))
        request = engine.submit(TEXT[:20], params)
        step = 0
        while not request.finished:
            request.speculation = SpeculationConfig(k=lengths[step % len(lengths)])
            engine.step()
            step += 1
        assert list(request.output) == plain


def test_a_kept_slot_serves_the_next_turn() -> None:
    target = loaded(reciter(words("bytes"), spread=30), words("bytes"))
    inner = drafter("digits", "text", spread=30)
    engine = Engine(target=target, drafter=inner, k=3)
    first = engine.generate(TEXT[:40], SamplingParams(max_tokens=20))[0]
    assert inner._pool.idle == 1
    second = TEXT[:40] + first.text
    assert engine.generate(second, SamplingParams(max_tokens=20))[0].token_ids == (
        Engine(target=target).generate(second, SamplingParams(max_tokens=20))[0].token_ids
    )


# --- the law


class _Forking:
    """Draws every token that can be drawn, by the request's own law."""

    def __init__(self, law: TokenLaw, fork: Fork) -> None:
        self.law, self.fork = law, fork

    def draw(self, logits: Tensor, path: Any) -> tuple[int, Tensor]:
        q = self.law.probs(logits[None], [path])[0]
        likely = [token for token, weight in enumerate(q.tolist()) if weight > 0]
        return likely[self.fork.decide(q[likely].tolist())], q


class _Asking:
    def __init__(self, ids: list[int], sampler: Any) -> None:
        self.id, self.ids, self.prompt_length, self.tenant, self.sampler = "r", ids, 1, "", sampler


def letters(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    backend = Backend(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


HERE = letters(["a", "b", "c", "ab"], [("a", "b")])
THERE = letters(["c", "bc", "b", "a", "ca"], [("b", "c"), ("c", "a")])


def table(size: int, seed: int) -> TableModel:
    def logits(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix[-3:], len(prefix))) % 2**31)
        return torch.randn(size, generator=generator, dtype=torch.float64) * 1.5

    return TableModel(logits, size)


def revive(ids: Any, row: Tensor) -> Tensor:
    """Gives the token that only the target has a fixed score, which undoes its exclusion from the draft."""
    return row.index_fill(0, torch.tensor([3]), 0.5)


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=2),
    SamplingParams(temperature=1.3, top_p=0.7, frequency_penalty=0.8),
    SamplingParams(temperature=1.0, min_p=0.2, logit_bias={3: 2.0}, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, processors=(revive,)),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("params", FILTERS, ids=["plain", "top-k", "top-p", "min-p", "processor"])
def test_the_law_is_the_targets(params: SamplingParams, rule: Any, method: str) -> None:
    """Every draft that the drafter itself can make, every outcome of the rule, summed (both padded by one)."""
    target = table(5, seed=1)  # one id more than the tokenizer has
    prompt = [0]

    def law_at(prefix: tuple[int, ...]) -> TokenLaw:
        law = TokenLaw(params, prompt, 5)
        law.commit(prefix)
        return law

    def p(prefix: tuple[int, ...]) -> Tensor:
        logits = torch.as_tensor(target.logits_fn((*prompt, *prefix)))
        return law_at(prefix).probs(logits[None], [()])[0]

    def drafts(prefix: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
        def run(fork: Fork) -> Draft:
            inner = VocabularyDrafter(table(6, seed=2), THERE, method)  # type: ignore[arg-type]
            inner.attach(DrafterContext(target, HERE))
            return inner.propose(_Asking([*prompt, *prefix], _Forking(law_at(prefix), fork)), 2)

        yield from outcomes(run)

    every = [draft for draft, _ in drafts(())]
    assert any(draft.tokens for draft in every)
    if method == "intersection" and not params.processors:
        assert {token for draft in every for token in draft.tokens} <= {0, 1, 2}  # never ab, which only the target has
        assert len({draft.tokens for draft in every}) > 1
    got = law_of_drafts(rule, p, drafts, 3)
    assert torch.allclose(got, plain_law(p, 3), rtol=0, atol=1e-9)


def test_the_check_can_fail() -> None:
    """The q of the whole vocabulary, claimed for a draw from the shared part, bends the law (case 1's kind)."""
    from foredraft.testing.law import exact_law

    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    shared = torch.tensor([1, 1, 1, 0], dtype=torch.float64) * q
    wrong = exact_law("rejection", lambda _: p, lambda _: shared / shared.sum(), 1, claimed_q=lambda _: q)
    assert not torch.allclose(wrong, p, atol=1e-3)
    right = exact_law("rejection", lambda _: p, lambda _: shared / shared.sum(), 1)
    assert torch.allclose(right, p, atol=1e-12)


# --- edges


def test_special_tokens_are_never_drafted() -> None:
    """The drafter wants to end after each word; its end means nothing to the target."""
    here, there = words("bytes"), words("digits", 360)
    base = reciter(there)
    end = there.backend.token_to_id(SPECIAL[2])

    def ends(prefix: tuple[int, ...]) -> Tensor:
        row = torch.as_tensor(base.logits_fn(prefix)).clone()
        row[end] = 50.0 if len(prefix) % 3 == 0 else 3.0
        return row

    for method in METHODS:
        inner = VocabularyDrafter(TableModel(ends, base.vocab_size), there, method)  # type: ignore[arg-type]
        engine = Engine(target=loaded(reciter(here), here), drafter=inner, k=5)
        result = engine.generate(TEXT[:20], SamplingParams(max_tokens=40, temperature=0.8))[0]
        assert result.error is None
        drafted = [draft.tokens for draft in _drafts_of(inner, here, TEXT[:25])]
        assert drafted
        assert not any(here.is_special(token) for tokens in drafted for token in tokens)


def _drafts_of(inner: VocabularyDrafter, here: Tokenizer, text: str) -> list[Draft]:
    ids = here.encode(text)
    law = TokenLaw(SamplingParams(temperature=1.0), ids[:1], reciter(here).vocab_size)

    class Sampler:
        def draw(self, logits: Tensor, path: Any) -> tuple[int, Tensor]:
            q = law.probs(logits[None], [path])[0]
            return draw(q, 0.5), q

    found = []
    for n in range(1, len(ids)):
        found.append(inner.propose(_Asking(ids[:n], Sampler()), 4))
    inner.stop(_Asking(ids, Sampler()))
    return found


def test_the_method_follows_the_request_and_the_overlap() -> None:
    """Greedy requests get text; sampled ones the intersection, if there is enough of it."""
    here = loaded(reciter(words("bytes")), words("bytes"))
    asking = _Asking(here.tokenizer.encode("The"), None)  # type: ignore[union-attr]
    for kind, size, sampled in (("bytes", 420, True), ("pieces", 480, True), (None, 0, False)):
        inner = drafter(kind, size=size) if kind else VocabularyDrafter(table(6, 0), THERE)
        Engine(target=here, drafter=inner)
        for rule, shared in (("exact", False), ("block", sampled), ("coupled", sampled)):
            asking.rule = rule  # type: ignore[attr-defined]
            assert inner._draws(asking) is shared
        assert (inner.vocabularies.coverage > 0.5) is sampled
    with pytest.raises(ConfigError, match="drafter vocabulary: no method 'both'; use auto, intersection, text"):
        drafter("bytes", "both")


def test_what_cannot_be_served_is_refused() -> None:
    here = words("bytes")
    with pytest.raises(VocabularyMismatchError, match="the target has no tokenizer"):
        Engine(target=reciter(here), drafter=drafter("digits"))
    small = TableModel(lambda prefix: [0.0] * 40, 40)  # case 18: logits of a reduced vocabulary without its map
    with pytest.raises(VocabularyMismatchError, match=r"tokenizer has .* tokens, its logits only 40"):
        Engine(target=loaded(reciter(here), here), drafter=VocabularyDrafter(small, words("digits")))
    with pytest.raises(ConfigError, match="write vocabulary:MODEL"):
        Engine(target=loaded(reciter(here), here), drafter="vocabulary")
    with pytest.raises(VocabularyMismatchError, match=r"token \d+ is .*vocabulary:MODEL"):
        Engine(target=loaded(reciter(here), here), drafter=ModelDrafter(reciter(words("digits")), words("digits")))
