"""A draft ends where its own probabilities say that a further token would not pay, and only where that bends no law."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from rig import V, chain, plain
from test_engine_length import Clock, CostlyModel

from foredraft import Engine, SamplingParams
from foredraft.drafters import ModelDrafter
from foredraft.drafters.foresight import TRUST, Foresight, grade
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.models.base import Segment
from foredraft.testing import TableModel
from foredraft.testing.stats import two_sample
from foredraft.testing.table import TableCache

PROMPTS = [[0], [1, 2, 3], list(range(V)) * 3]


def price(row: float = 0.05, token: float = 0.05, **changes: bool) -> StepPrice:
    """A plain step takes one second."""
    return StepPrice(1.0, lambda n: 1.0 + row * n, lambda: (0.0, token), **changes)


def hedging(sure: Callable[[int], float], right: Callable[[int], bool]) -> TableModel:
    """Gives its likeliest token the probability ``sure(position)``; that is the target's where ``right(position)``."""
    good = chain()

    def logits(prefix: tuple[int, ...]) -> list[float]:
        row, at = good(prefix), len(prefix)
        best = max(range(V), key=row.__getitem__)
        token = best if right(at) else (best + 1) % V
        return (
            [math.log((1 - sure(at)) / (V - 1))] * token
            + [math.log(sure(at))]
            + [math.log((1 - sure(at)) / (V - 1))] * (V - 1 - token)
        )

    return TableModel(logits, V)


class Roomy(TableCache):
    """Can say beforehand whether there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}

    def reserve(self, rows: Mapping[int, int]) -> None:
        self.found = {slot: self.length(slot) + n for slot, n in rows.items()}

    def append(self, segments: Sequence[Segment], limit: int | None) -> None:
        for segment in segments:
            if self.found:  # then for all of the pass
                assert self.length(segment.slot) + len(segment.tokens) <= self.found[segment.slot]
        self.found = {}
        super().append(segments, limit)


def engine(
    drafter: TableModel, row: float = 0.05, token: float = 0.05, roomy: bool = False, **options: object
) -> tuple[Engine, Clock]:
    clock = Clock()
    target = CostlyModel(clock, lambda rows: 1.0 + row * (rows - 1))
    if roomy:
        target._cache = Roomy()
    read = drafter.forward

    def forward(segments, taps=()):  # type: ignore[no-untyped-def]
        clock.now += token * len(segments[0].tokens)
        return read(segments, taps)

    drafter.forward = forward  # type: ignore[method-assign]
    return Engine(target=target, drafter=ModelDrafter(drafter), clock=clock, max_k=8, **options), clock  # type: ignore[arg-type]


def test_a_probability_has_a_class() -> None:
    assert [grade(p) for p in (0.0, 0.05, 0.1, 0.49, 0.99, 1.0)] == [0, 0, 1, 4, 9, 9]
    assert list(TRUST) == sorted(TRUST)


def test_the_bound_is_the_price_of_a_token_at_the_speed_of_the_draft() -> None:
    outlook = Outlook((0.8, 0.4), drafted=(1.0, 0.5))
    # 2.2 tokens in 1 + 1.5 * 0.1 seconds, and a token takes a row and its drafting
    assert price().least(outlook, 4) == pytest.approx(0.1 * 2.2 / 1.15)
    assert price(0.5, 0.5).least(outlook, 4) == pytest.approx(1.0)  # plain decoding is quicker than such drafts
    assert price().least(Outlook(()), 4) == 0.0


def test_nothing_ends_early_where_the_length_is_fixed() -> None:
    foresight = Foresight()
    assert foresight.outlook(8, price()) is not None
    assert foresight.least > 0
    assert foresight.outlook(8, price(elastic=False)) is None
    assert foresight.least == 0.0


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_it_learns_what_a_probability_is_worth(rate: float) -> None:
    foresight = Foresight()
    for i in range(200):
        foresight.made(4, [0.55, 0.95])
        foresight.verified(2 if i % 10 < 10 * rate else 0)
    assert foresight.trust[5] == pytest.approx(rate, abs=0.1)
    assert foresight.trust[9] > 0.95
    assert foresight.trust[3] == TRUST[3]
    foresight.verified(0)  # nothing was made
    assert foresight.trust[5] == pytest.approx(rate, abs=0.1)


def test_drafts_that_were_cut_say_nothing_about_how_far_they_would_have_gone() -> None:
    cut, ended = Foresight(), Foresight()
    for _ in range(50):
        cut.made(3, [0.95] * 3)
        cut.verified(3)
        ended.made(8, [0.95, 0.95, 0.3])
        ended.verified(2)
    far, near = cut.outlook(8, price()), ended.outlook(8, price())
    assert far is not None
    assert near is not None
    assert far.rows(8) > 7
    assert far.reach[7] > 0.6
    assert near.rows(8) == pytest.approx(3, abs=0.3)
    assert 1.7 < sum(near.reach) < 3.2


def test_a_draft_ends_with_the_doubtful_token() -> None:
    """Every fourth token is wrong, and the model knows it."""
    made, clock = engine(hedging(lambda at: 0.15 if at % 4 == 0 else 0.97, lambda at: at % 4 != 0))
    params = SamplingParams(max_tokens=400)
    result = made.generate([PROMPTS[0]], params)[0]
    assert result.token_ids == plain(PROMPTS[0], params)
    late = [step for step in result.stats.trace if step.drafted][20:-4]
    assert {step.drafted - step.accepted for step in late} <= {0, 1}
    assert max(step.drafted for step in late) == 4
    assert clock.now < 0.45 * 400


@pytest.mark.parametrize("sure", [0.3, 0.97])
def test_a_model_that_misjudges_itself_is_soon_known(sure: float) -> None:
    """It is always right but never sure, or half of the time wrong and always sure."""
    drafter = hedging(lambda at: sure, lambda at: sure < 0.5 or at % 2 == 0)
    made, _ = engine(drafter, row=0.1, token=0.1)
    result = made.generate([PROMPTS[1]], SamplingParams(max_tokens=600))[0]
    late = [step.drafted for step in result.stats.trace][-60:-4]
    if sure < 0.5:
        assert sum(late) / len(late) > 7
    else:
        assert sum(late) / len(late) < 3.5


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=1.0, seed=1)]
)
def test_a_fixed_length_is_drafted_whole(params: SamplingParams) -> None:
    made, _ = engine(hedging(lambda at: 0.15, lambda at: False), k=6)
    for result in made.generate(PROMPTS, params):
        assert {step.drafted for step in result.stats.trace[1:-7]} == {6}


def test_room_is_found_for_all_of_a_pass() -> None:
    """A cache that only checks must hear of the others, too, or what was drawn would decide whether it has room."""
    made, _ = engine(hedging(varied, lambda at: True), row=0.01, token=0.01, roomy=True)
    cache, found = made.target.cache, list[int]()
    assert isinstance(cache, Roomy)
    reserve = cache.reserve
    cache.reserve = lambda rows: found.append(len(rows)) or reserve(rows)  # type: ignore[method-assign,func-returns-value]
    params = [SamplingParams(max_tokens=60, temperature=1.0), SamplingParams(max_tokens=60)]
    made.generate(PROMPTS[:2], params)
    assert max(found) == 2


def varied(at: int) -> float:
    return 0.15 if at % 4 == 0 else 0.97


@pytest.mark.parametrize("verify", ["block", "rejection", "coupled"])
def test_a_sampled_draft_ends_early_where_room_was_found_before(verify: str) -> None:
    """Under the coupled rule what was drawn may end anywhere: it is only compared."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=3)
    ended: dict[bool, int] = {}
    for found in (True, False):
        made, _ = engine(hedging(varied, lambda at: True), row=0.01, token=0.01, roomy=found, verify=verify)
        drafter = made.drafter
        assert isinstance(drafter, ModelDrafter)
        ended[found], ask = 0, drafter.propose_batch

        def propose_batch(requests, ks, found=found, ask=ask, made=made):  # type: ignore[no-untyped-def]
            cache = made.target.cache
            if isinstance(cache, Roomy) and verify != "coupled":  # before anything is drawn
                assert cache.found[requests[0].slot] == len(requests[0].ids) + ks[0]
            drafts = ask(requests, ks)
            ended[found] += drafts[0].k < ks[0]
            return drafts

        drafter.propose_batch = propose_batch  # type: ignore[method-assign]
        made.generate([PROMPTS[0]], params)
        assert not drafter._foresights  # nothing of it stays behind
    assert ended[True] > 10
    assert (ended[False] > 10) == (verify == "coupled")


@pytest.mark.parametrize("verify", ["block", "rejection"])
def test_the_law_holds_where_drafts_end_by_what_was_drawn(verify: str) -> None:
    params, counts = SamplingParams(temperature=1.0, max_tokens=3), []
    for drafter in (None, ModelDrafter(TableModel(lambda p: [0.6 * x for x in chain()(p)], V))):
        target = TableModel(chain(), V)
        target._cache = Roomy()
        made = Engine(target=target, drafter=drafter, verify=verify, max_batch=16, max_k=4)  # type: ignore[arg-type]
        results = made.generate([PROMPTS[1]] * 2000, params)
        counts.append([tuple(r.token_ids) for r in results])
        if drafter is not None:
            assert len({step.drafted for r in results for step in r.stats.trace}) > 1
    kinds = sorted({text for texts in counts for text in texts})
    table = [[float(texts.count(kind)) for kind in kinds] for texts in counts]
    assert two_sample(*table).p_value > 1e-4
