"""Several drafters beside one another: every request has the text, and the law, that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters import ChoiceDrafter, Drafter, DraftRequest, LookupDrafter, ModelDrafter, SuffixDrafter
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.engine.request import Request
from foredraft.errors import ConfigError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.sampling.noise import Purpose, RequestNoise
from foredraft.testing import ScriptedDrafter, TableModel
from foredraft.testing.fork import Fork, Uniform, outcomes
from foredraft.testing.law import plain_law
from foredraft.types import Draft, Verdict

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1], [2, 2], [5, 6, 5, 6, 5]]


def drafters() -> dict[str, Drafter]:
    return {
        "copies": LookupDrafter(3, 1),
        "good": ModelDrafter(model()),
        "poor": ModelDrafter(model(seed=9)),
        "suffix": SuffixDrafter(),
    }


def wants(names: Sequence[str | None], **options: Any) -> list[SpeculationConfig]:
    return [
        SpeculationConfig(k=0) if name is None else SpeculationConfig(drafter=name, **{"k": 4, **options})
        for name in names
    ]


@pytest.mark.parametrize("k", [1, 4, "auto"])
@pytest.mark.parametrize("chunk", [2, 512])
def test_greedy_is_plain_in_a_mixed_batch(k: int | str, chunk: int) -> None:
    params = SamplingParams(max_tokens=40)
    engine = Engine(target=model(), drafter=drafters(), max_step_tokens=chunk)
    assert engine.drafters == ("copies", "good", "poor", "suffix")
    for turn in range(3):
        names = ["copies", "good", None, "suffix", "poor"]
        names = names[turn:] + names[:turn]
        results = engine.generate(PROMPTS, params, speculation=wants(names, k=k))
        assert [r.token_ids for r in results] == [plain(p, params) for p in PROMPTS]
        assert [r.drafter for r in results] == ["copies" if name is None else name for name in names]
        good = results[names.index("good")].stats
        assert good.num_accepted_draft_tokens == good.num_draft_tokens
        assert k == "auto" or good.draft_acceptance_rate == 1.0  # auto may find that drafting does not pay here


@pytest.mark.parametrize("verify", ["coupled", "block", "rejection"])
def test_seeds_and_rules(verify: str) -> None:
    """What a request writes depends on its own drafter and seed, never on its neighbours' drafters."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    names = ["good", "copies", "poor", "suffix", "good"]
    mixed = Engine(target=model(), drafter=drafters()).generate(
        PROMPTS, params, speculation=wants(names, verify=verify)
    )
    for name, prompt, result in zip(names, PROMPTS, mixed, strict=True):
        alone = Engine(target=model(), drafter=drafters()[name], k=4, verify=verify)  # type: ignore[arg-type]
        assert result.token_ids == alone.generate([prompt], params)[0].token_ids
        if verify == "coupled":
            assert result.token_ids == plain(prompt, params)


class Forked(RequestNoise):
    """Noise that takes every value, see :mod:`foredraft.testing.fork`."""

    def __init__(self, fork: Fork) -> None:
        super().__init__(0)
        self.fork, self.numbers = fork, dict[Any, Uniform]()

    def uniform(self, purpose: Purpose, position: int, anchor: int) -> Any:
        return self.numbers.setdefault((purpose, position, anchor), Uniform(self.fork))

    def uniforms(self, purpose: Purpose, first: int, anchor: int, n: int) -> list[Any]:
        return [self.uniform(purpose, position, anchor) for position in range(first, first + n)]


class Sampled(Drafter):
    """Draws from a law of its own, k tokens in a row."""

    def __init__(self, seed: int) -> None:
        self.law = chain(seed, 3)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        ids, rows = list(request.ids), []
        for i in range(k):
            logits = torch.tensor(self.law(tuple(ids)), dtype=torch.float64)
            token, q = request.sampler.draw(logits, ids[len(ids) - i :])
            ids.append(token)
            rows.append(q)
        return Draft(tuple(ids[len(ids) - k :]), torch.stack(rows) if rows[0] is not None else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", ["block", "rejection"])
@pytest.mark.parametrize("mine", ["one", "other"])
def test_the_law_of_a_request_beside_one_with_another_drafter(verify: str, mine: str) -> None:
    """Every outcome of one request's random numbers, through the engine itself, while another runs in its batch."""
    length, others = 4, {"one": "other", "other": "one"}
    counts = torch.zeros((3,) * length, dtype=torch.float64)

    def run(fork: Fork) -> tuple[int, ...]:
        engine = Engine(target=model(0, 3), drafter={"one": Sampled(5), "other": Sampled(6)})
        params = SamplingParams(max_tokens=length, temperature=1.0)
        config = SpeculationConfig(k=2, verify=verify, drafter=mine)  # type: ignore[arg-type]
        request = engine.prepare([1], params, speculation=config)
        request.noise = request.sampler._noise = Forked(fork)
        beside = params.model_copy(update={"seed": 3, "max_tokens": 9})
        neighbour = engine.prepare([2, 1], beside, speculation=config.model_copy(update={"drafter": others[mine]}))
        for one in (neighbour, request):
            engine.add(one)
        while not request.finished:
            engine.step()
        assert request.error is None
        assert request.stats.num_draft_tokens > 0
        return tuple(request.output)

    for text, weight in outcomes(run):
        counts[text] += weight

    def p(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(chain(0, 3)((1, *prefix)), dtype=torch.float64).softmax(-1)

    assert torch.allclose(counts, plain_law(p, length), rtol=0, atol=1e-12)


class Tapped(TableModel):
    """Its hidden state at every layer is the layer and the token."""

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        rows = [torch.tensor([[[layer, token] for layer in taps] for token in s.tokens]) for s in segments]
        return ForwardOutput(super().forward(segments).logits, rows if taps else [])


class Watching(ScriptedDrafter):
    """Keeps what it is told."""

    def __init__(self, taps: tuple[int, ...] = ()) -> None:
        super().__init__(oracle(wrong=lambda p: p % 3 == 0).propose_fn)
        self.taps = taps
        self.seen: dict[str, list[Any]] = {}
        self.batches: list[list[str]] = []
        self.stopped: list[str] = []

    def start(self, request: DraftRequest) -> None:
        self.seen[request.id] = []

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        self.batches.append([request.id for request in requests])
        return super().propose_batch(requests, ks)

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: torch.Tensor | None) -> None:
        self.seen[request.id].append(taps)

    def stop(self, request: DraftRequest) -> None:
        self.stopped.append(request.id)


def test_a_drafter_hears_of_its_own_requests_only_and_gets_its_own_taps() -> None:
    deep, plainer = Watching((2, 5)), Watching()
    engine = Engine(target=Tapped(chain(), V), drafter={"deep": deep, "plainer": plainer, "shallow": Watching((1, 2))})
    names = ["deep", "plainer", "deep"]
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=20), speculation=config)
        for prompt, config in zip(PROMPTS, wants(names), strict=False)
    ]
    while engine.scheduler.busy:
        engine.step()
    ids = [request.id for request in requests]
    assert list(deep.seen) == [ids[0], ids[2]]
    assert set(deep.stopped) == {ids[0], ids[2]}
    assert list(plainer.seen) == plainer.stopped == [ids[1]]
    assert [ids[0], ids[2]] in deep.batches  # asked at once
    for request in (requests[0], requests[2]):
        rows = torch.cat(deep.seen[request.id])
        assert rows[:, :, 0].tolist() == [[2, 5]] * len(rows)
        assert rows[:, 0, 1].tolist() == list(request.ids[:-1])
    assert all(taps is None for taps in plainer.seen[ids[1]])


def test_a_dear_drafter_does_not_make_a_cheap_one_look_dear() -> None:
    now = [0.0]

    def slow(prefix: tuple[int, ...], k: int) -> list[int]:
        now[0] += 5.0 * k
        return list(oracle().propose_fn(prefix, k))  # type: ignore[arg-type]

    class Timed(TableModel):
        def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            now[0] += 1.0 + 0.01 * sum(len(s.tokens) for s in segments)
            return super().forward(segments, taps)

    clock = lambda: now[0]  # noqa: E731
    choice = ChoiceDrafter({"cheap": oracle(), "dear": ScriptedDrafter(slow)}, clock)
    engine = Engine(target=Timed(chain(), V), drafter=choice, clock=clock)
    params = SamplingParams(max_tokens=200)
    cheap, dear = engine.generate([[1], [2]], params, speculation=wants(["cheap", "dear"], k="auto"))
    assert cheap.stats.tokens_per_step > 5  # type: ignore[operator]
    assert dear.stats.num_draft_tokens < 0.2 * dear.usage.completion_tokens
    assert [cheap.token_ids, dear.token_ids] == [plain([1], params), plain([2], params)]


def test_one_drafter_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fails(prefix: tuple[int, ...], k: int) -> list[int]:
        raise RuntimeError("no")

    engine = Engine(target=model(), drafter={"fails": ScriptedDrafter(fails), "good": oracle()})
    params = SamplingParams(max_tokens=30)
    bad, good = engine.generate([[1], [2]], params, speculation=wants(["fails", "good"]))
    assert [bad.token_ids, good.token_ids] == [plain([1], params), plain([2], params)]
    assert bad.stats.num_draft_tokens == 0
    assert good.stats.draft_acceptance_rate == 1.0
    assert "goes on without its drafter: no" in caplog.text
    assert isinstance(engine.drafter, ChoiceDrafter)
    assert not engine.drafter._served


def test_what_one_tenant_wrote_is_not_drafted_for_another() -> None:
    """Each of two suffix pools is kept apart by tenant, whichever of them a request asks for."""
    engine = Engine(target=model(), drafter=["first=suffix", "second=suffix"], k=6)
    params = SamplingParams(max_tokens=40)

    def steps(name: str, tenant: str) -> int:
        [result] = engine.generate([[3, 1]], params, speculation=wants([name], k=6), tenant=tenant)
        return result.stats.num_steps

    cold = steps("first", "a")
    assert steps("first", "a") < cold  # it knows the text now
    assert steps("second", "a") == cold  # another drafter does not
    assert steps("first", "b") == cold  # nor the same one for somebody else


def test_outlooks_carry_the_price_of_their_own_drafter() -> None:
    class Says(ScriptedDrafter):
        def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
            return Outlook((0.5,), setup=price.line()[1])

    choice = ChoiceDrafter({"says": Says(lambda prefix, k: []), "scripted": oracle()})
    engine = Engine(target=model(), drafter=choice)
    made: dict[str, Request] = {}
    for config in wants(["says", "scripted"]):
        request = engine.prepare([1, 2, 1, 2, 1], SamplingParams(max_tokens=9), speculation=config)
        made[request.drafter] = request
        choice.start(request)
    choice._parts["says"].costs.observe(2, 0, 4.0)
    choice._parts["scripted"].costs.observe(1, 0, 3.0)
    price = StepPrice(1.0, lambda n: 1.0, lambda: (0.0, 99.0))
    assert choice.outlook(made["says"], 4, price) == Outlook((0.5,), 2.0, 2.0)
    scripted = choice.outlook(made["scripted"], 4, price)
    assert (scripted.seconds, scripted.watched, len(scripted.reach)) == (3.0, False, 4)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "no drafter is named"),
        (["lookup", "lookup:3,1"], "two drafters are called 'lookup'; give one another name: NAME=lookup:3,1"),
        ({"none": "lookup"}, "'none' cannot be a drafter's name"),
        ({"a b": "lookup"}, "'a b' cannot be a drafter's name"),
        ([5], "5 is no drafter"),
        ({"a": None}, "None is no drafter"),
        (5, "5 is no drafter"),
        (["lookup", "a=nonsense"], "no drafter is called 'nonsense'"),
    ],
)
def test_what_is_no_choice_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        Engine(target=model(), drafter=given)
    assert caught.value.field == "drafter"


@pytest.mark.parametrize("given", [None, "lookup", ["a=lookup", "suffix"]])
def test_a_request_can_name_only_what_is_there(given: Any) -> None:
    engine = Engine(target=model(), drafter=given)
    with pytest.raises(ConfigError, match="no drafter is called 'model' here") as caught:
        engine.generate([[1]], SamplingParams(max_tokens=3), speculation=SpeculationConfig(drafter="model"))
    names = {None: "none: drop it", "lookup": "lookup"}.get(given if isinstance(given, str | None) else "", "a, suffix")
    assert names in (caught.value.remedy or "")
    assert engine.generate([[1]], SamplingParams(max_tokens=3))[0].drafter == {None: "none", "lookup": "lookup"}.get(
        given if not isinstance(given, list) else "", "a"
    )


def test_a_bad_drafter_does_not_take_the_good_one_from_its_tenant() -> None:
    """The guard keeps an account for each drafter of a tenant."""
    engine = Engine(
        target=model(), drafter={"good": oracle(), "bad": oracle(wrong=lambda p: True)}, guard=True, guard_rate=0.5
    )
    params = SamplingParams(max_tokens=80)
    for _ in range(8):
        engine.generate([[1]], params, speculation=wants(["bad"]), tenant="t")
    assert engine.guard.tenant("t", "bad").state != "open"
    [good] = engine.generate([[2]], params, speculation=wants(["good"]), tenant="t")
    assert engine.guard.tenant("t", "good").state == "open"
    assert good.stats.draft_acceptance_rate == 1.0
    assert good.stats.num_steps < 25
