"""A small encoder–decoder model drafts for a large one: the target's text and law, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers as tf
from test_t5 import START, V, build
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters import DrafterContext, registry
from foredraft.drafters.encoder_decoder import EncoderDecoderDrafter
from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError, VocabularyMismatchError
from foredraft.models.base import Segment
from foredraft.models.encoder_decoder import EncoderDecoderTarget, load_encoder_decoder
from foredraft.testing import TableModel
from foredraft.testing.law import exact_law, plain_law

SOURCE = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as a checkpoint."""
    path = tmp_path_factory.mktemp(request.param)
    build(request.param, 1).save_pretrained(path)
    return path


@pytest.fixture
def target(folder: Path) -> EncoderDecoderTarget:
    return EncoderDecoderTarget(build(load_encoder_decoder(str(folder)).config.model_type, 0))


def test_greedy_text_is_plain_decodings(folder: Path, target: EncoderDecoderTarget) -> None:
    prompts = [[*SOURCE, START], [11, 12, START], [*SOURCE, 3, START]]
    params = SamplingParams(max_tokens=20, ignore_eos=True, bad_token_ids=((START,),))
    plain = [r.token_ids for r in Engine(target=target).generate(prompts, params)]
    for k in (1, 4):
        engine = Engine(target=target, drafter=f"encoder-decoder:{folder}", dtype="float64", k=k)
        assert isinstance(engine.drafter, EncoderDecoderDrafter)
        results = engine.generate(prompts, params)
        assert [r.token_ids for r in results] == plain
        assert sum(step.drafted for r in results for step in r.stats.trace) >= 3 * 19 * k // (k + 1)


def test_both_encoders_run_once_a_request(folder: Path, target: EncoderDecoderTarget) -> None:
    drafter = EncoderDecoderDrafter(load_encoder_decoder(str(folder), "float64"))
    calls: list[str] = []
    for name, model in (("target", target.model), ("drafter", drafter.model.model)):
        model.get_encoder().register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    params = SamplingParams(max_tokens=16, ignore_eos=True, bad_token_ids=((START,),))
    Engine(target=target, drafter=drafter, k=3).generate([[*SOURCE, START]], params)
    assert sorted(calls) == ["drafter", "target"]


def law_of(model: EncoderDecoderTarget, few: list[int]) -> object:
    """The model's law over a few tokens behind the source, through the adapter itself."""

    def law(prefix: tuple[int, ...]) -> Tensor:
        slot = model.cache.allocate()
        tokens = [*SOURCE, START, *(few[i] for i in prefix)]
        logits = model.forward([Segment(slot, tokens, len(tokens) - 1)]).logits[0][0]
        model.cache.commit(slot, 0)
        model.cache.free(slot)
        return torch.softmax(logits[few].double(), -1)

    return law


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_the_law_of_the_pair_by_enumeration(rule: str, folder: Path, target: EncoderDecoderTarget) -> None:
    p = law_of(target, [3, 9, 17, 40])
    q = law_of(load_encoder_decoder(str(folder), "float64"), [3, 9, 17, 40])
    law = exact_law(rule, p, q, k=2, length=3)  # type: ignore[arg-type]
    wanted = plain_law(p, length=3)  # type: ignore[arg-type]
    assert float((law - wanted).abs().max()) < 1e-12
    assert float((p(()) - q(())).abs().sum()) > 0.05  # type: ignore[operator]


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_what_it_drafts_was_drawn_from_the_q_it_reports(
    verify: str, folder: Path, target: EncoderDecoderTarget
) -> None:
    """Every proposal of a sampled run: q is the small model's own law at that place, after the request's filters."""
    small = load_encoder_decoder(str(folder), "float64")
    drafter = EncoderDecoderDrafter(small)
    seen: list[tuple[list[int], tuple[int, ...], Tensor]] = []
    propose = drafter.propose_batch

    def spy(requests, ks):  # type: ignore[no-untyped-def]
        drafts = propose(requests, ks)
        seen.extend((list(r.ids), d.tokens, d.q) for r, d in zip(requests, drafts, strict=True) if d.tokens)
        return drafts

    drafter.propose_batch = spy  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.8, top_k=7, max_tokens=24, ignore_eos=True, bad_token_ids=((START,),))
    Engine(target=target, drafter=drafter, k=3, verify=verify).generate([[*SOURCE, START]], params)
    fresh = load_encoder_decoder(str(folder), "float64").model
    for ids, tokens, q in seen:
        at = ids.index(START)
        with torch.no_grad():
            output = torch.tensor([[*ids[at:], *tokens]])
            logits = fresh(input_ids=torch.tensor([ids[:at]]), decoder_input_ids=output, use_cache=False).logits[0]
        rows = logits[len(ids) - at - 1 : -1].double() / 0.8
        rows[:, START] = -torch.inf
        kept = rows >= rows.topk(7, -1).values[:, -1:]
        wanted = torch.softmax(rows.masked_fill(~kept, -torch.inf), -1)
        torch.testing.assert_close(q.double(), wanted, rtol=0, atol=1e-5)
    assert len(seen) > 5
    assert any(a != b for (a, *_), (b, *_) in itertools.pairwise(seen))


def test_misuse_is_refused(folder: Path, target: EncoderDecoderTarget, tmp_path: Path) -> None:
    context = DrafterContext(target, None)
    with pytest.raises(ConfigError, match="names no model; write encoder-decoder:FOLDER"):
        registry.create("encoder-decoder", context)
    with pytest.raises(ModelLoadError, match="no such folder"):
        registry.create(f"encoder-decoder:{tmp_path / 'nothing'}", context)
    drafter = EncoderDecoderDrafter(load_encoder_decoder(str(folder)))
    with pytest.raises(UnsupportedModelError, match="the target has no encoder; use the drafter 'model'"):
        Engine(target=TableModel(lambda prefix: [0.0] * V, V), drafter=drafter)
    drafter.model.start = 4
    with pytest.raises(ConfigError, match="starts with token 4, the target's with 0"):
        drafter.attach(context)
    drafter.model.start, drafter.model._vocab_size = START, V - 1
    with pytest.raises(VocabularyMismatchError):
        drafter.attach(context)
    causal = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2))
    causal.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="knows no sequence-to-sequence model of this kind"):
        load_encoder_decoder(str(tmp_path / "gpt2"))
