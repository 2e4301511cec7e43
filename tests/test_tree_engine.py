"""Trees in the engine: text, law, processors, stops, budgets, taps, broken rows and statistics along accepted paths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from rig import V, chain, model, oracle, plain
from test_engine_taps import Tapped

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters import Drafter, DraftRequest
from foredraft.models.base import ForwardOutput, Segment
from foredraft.sampling import TokenLaw
from foredraft.testing import TableModel
from foredraft.testing.law import plain_law
from foredraft.testing.stats import goodness_of_fit
from foredraft.types import NO_DRAFT, Draft, Verdict

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1], list(range(V)) * 3]


class Bushy(Drafter):
    """Hides the target's greedy text at random places of a random tree; ``wrong`` tells where it errs."""

    def __init__(self, seed: int = 0, hit: float = 0.8, vocab: int = V) -> None:
        self.rng = random.Random(seed)
        self.vocab = vocab
        self.logits = chain(0, vocab)
        self.hit = hit
        self.verdicts: list[Verdict] = []

    def propose(self, request: DraftRequest, k: int) -> Draft:
        n = self.rng.randint(1, k)
        tokens: list[int] = []
        parents: list[int] = []
        draft = NO_DRAFT
        for node in range(n):
            parent = self.rng.randint(-1, node - 1)
            row = self.logits((*request.ids, *draft.path(parent + 1)))
            best = max(range(self.vocab), key=row.__getitem__)
            tokens.append(best if self.rng.random() < self.hit else self.rng.randrange(self.vocab))
            parents.append(parent)
            draft = Draft(tuple(tokens), None, tuple(parents))
        return draft

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: torch.Tensor | None) -> None:
        if verdict is not None:
            self.verdicts.append(verdict)


class Twigs(Drafter):
    """Draws trees from a table model by the request's sampler: two children, then one, then none."""

    def __init__(self, seed: int, vocab: int = V) -> None:
        self.logits = chain(seed, vocab)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[torch.Tensor] = []
        draft = NO_DRAFT
        for parent, count in ((-1, 2), (0, 2), (1, 1), (2, 1)):
            if parent >= len(tokens) or len(tokens) + count > k:
                break
            path = draft.path(parent + 1)
            row = torch.tensor([self.logits((*request.ids, *path))], dtype=torch.float64)
            [children] = request.sampler.children(row, [path], [count])
            tokens += children.tokens
            parents += [parent] * len(children.tokens)
            laws += [] if children.q is None else list(children.q)
            draft = Draft(tuple(tokens), torch.stack(laws) if laws else None, tuple(parents))
        return draft


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_plain(seed: int, k: int | str) -> None:
    params = SamplingParams(max_tokens=40)
    for drafter in (Bushy(seed), Twigs(seed)):
        results = Engine(target=model(), drafter=drafter, k=k).generate(PROMPTS, params)  # type: ignore[arg-type]
        assert [r.token_ids for r in results] == [plain(p, params) for p in PROMPTS]


def test_paths_that_leave_the_first_branch_are_accepted() -> None:
    drafter = Bushy(1)
    Engine(target=model(), drafter=drafter, k=8).generate(PROMPTS, SamplingParams(max_tokens=60))
    jumps = [v for v in drafter.verdicts if v.path != tuple(range(v.accepted))]
    assert len(jumps) > 10
    assert max(v.accepted for v in drafter.verdicts) >= 4


@pytest.mark.parametrize(
    "controls", [{}, {"top_p": 0.8, "repetition_penalty": 1.4}, {"top_k": 2, "frequency_penalty": 1.0}]
)
def test_a_seed_gives_one_text_whatever_the_tree(controls: dict[str, float]) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=30, seed=seed, **controls) for seed in range(3)]  # type: ignore[arg-type]
    prompts = PROMPTS[:3]
    wanted = [plain(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for drafter in (Bushy(2), Twigs(5)):
        for k in (2, 6):
            results = Engine(target=model(), drafter=drafter, k=k).generate(prompts, params)
            assert [r.token_ids for r in results] == wanted
            assert sum(r.stats.num_accepted_draft_tokens for r in results) > 0


def test_a_perfect_drafter_races_to_the_targets_own_draw() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3)
    [result] = Engine(target=model(), drafter=Twigs(0), k=6).generate([[1]], params)
    assert [s.accepted for s in result.stats.trace[1:-1]] == [s.depth for s in result.stats.trace[1:-1]]


@pytest.mark.parametrize(("rule", "drafter"), [("rejection", "drawn"), ("block", "drawn"), ("block", "chosen")])
def test_the_whole_path_has_the_targets_law_over_seeds(rule: str, drafter: str) -> None:
    small = chain(0, 3)
    made: Drafter = Twigs(9, 3) if drafter == "drawn" else Bushy(4, hit=0.5, vocab=3)
    params = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5, "max_tokens": 7}
    engine = Engine(target=TableModel(small, 3), drafter=made, k=6, max_batch=32, prefix_reuse=False)
    each = [SamplingParams(seed=seed, **params) for seed in range(240)]  # type: ignore[arg-type]
    results = engine.generate([[0, 1]] * len(each), each, speculation=SpeculationConfig(k=6, verify=rule))  # type: ignore[arg-type]
    counts = torch.zeros((3,) * 3)
    for result in results:
        counts[tuple(result.token_ids[:3])] += 1
    assert sum(s.accepted > 1 for r in results for s in r.stats.trace) > 40

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        one = TokenLaw(SamplingParams(**params), [0, 1], 3)  # type: ignore[arg-type]
        one.commit(prefix)
        return one.probs(torch.tensor([small((0, 1, *prefix))], dtype=torch.float64), [()])[0]

    assert goodness_of_fit(counts.flatten(), plain_law(law, 3).flatten()).p_value > 1e-3


class Rhythm:
    """A stateful processor: bans the token that equals the number of rows seen so far, modulo V."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.rows += 1
        logits[self.rows % V] = float("-inf")
        return logits

    def snapshot(self) -> object:
        return self.rows

    def restore(self, state: object) -> None:
        assert isinstance(state, int)
        self.rows = state


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stateful_processors_follow_the_accepted_path(temperature: float) -> None:
    def params() -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=5, max_tokens=40, processors=(Rhythm(),))

    for drafter in (Bushy(3), Twigs(0)):
        [result] = Engine(target=model(), drafter=drafter, k=7).generate([[1, 2]], params())
        assert result.token_ids == plain([1, 2], params())
        assert result.stats.num_accepted_draft_tokens > 5


def test_logprobs_belong_to_the_rows_of_the_path() -> None:
    params = SamplingParams(max_tokens=40, logprobs=2)
    [result] = Engine(target=model(), drafter=Bushy(5), k=8).generate([[1, 2]], params)
    [wanted] = Engine(target=model()).generate([[1, 2]], params)
    assert result.logprobs == wanted.logprobs


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 8, 9])
def test_budgets_and_ends_inside_a_path(budget: int) -> None:
    params = SamplingParams(max_tokens=budget)
    [result] = Engine(target=model(), drafter=Bushy(6, hit=1.0), k=8).generate([[1, 2]], params)
    assert result.token_ids == plain([1, 2], params)
    whole = plain([1, 2], SamplingParams(max_tokens=30))
    stop = SamplingParams(max_tokens=30, stop_token_ids=(whole[budget],))
    engine = Engine(target=model(), drafter=Bushy(6, hit=1.0), k=8)
    request = engine.submit([1, 2], stop)
    while not request.finished:
        engine.step()
        if request.slot is not None:  # nothing is cached that was not committed
            cached = engine.target.cache.tokens(request.slot)  # type: ignore[attr-defined]
            assert cached == request.ids[: len(cached)]
    assert list(request.output) == plain([1, 2], stop)


class Tapping(Bushy):
    taps = (2, 5)

    def __init__(self) -> None:
        super().__init__(7)
        self.seen: list[list[list[int]]] = []

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: torch.Tensor | None) -> None:
        assert taps is not None
        self.seen += taps.tolist()
        if verdict is not None:
            assert len(self.seen) == len(request.ids) - 1


def test_taps_are_those_of_the_accepted_path() -> None:
    class TreeTapped(Tapped):
        def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            output = super().forward(segments, taps)
            for segment, rows in zip(segments, output.taps, strict=True):
                for i, parent in enumerate(segment.parents or ()):  # positions are those of the path
                    rows[i, :, 2] = rows[parent, 0, 2] + 1 if parent >= 0 else rows[0, 0, 2]
            return output

    drafter = Tapping()
    engine = Engine(target=TreeTapped(chain(), V), drafter=drafter, k=8)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=40))
    while engine.scheduler.busy:
        engine.step()
    assert drafter.seen == [[[layer, token, i] for layer in (2, 5)] for i, token in enumerate(request.ids[:-1])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken_at", [4, 9, 10, 11])
def test_a_broken_row_ends_the_text_exactly_where_plain_decoding_ends(temperature: float, broken_at: int) -> None:
    good = chain()

    def logits(prefix: tuple[int, ...]) -> list[float]:
        return [float("nan")] * V if len(prefix) >= broken_at else good(prefix)

    params = SamplingParams(temperature=temperature, seed=2, max_tokens=30)
    [wanted] = Engine(target=TableModel(logits, V)).generate([[1, 2]], params, raise_errors=False)
    for seed in range(6):
        for verify in ("coupled", "block", "rejection"):
            config = SpeculationConfig(k=8, verify=verify)  # type: ignore[arg-type]
            [result] = Engine(target=TableModel(logits, V), drafter=Bushy(seed)).generate(
                [[1, 2]], params, raise_errors=False, speculation=config
            )
            assert result.finish_reason == "error"
            assert len(result.token_ids) == len(wanted.token_ids) == broken_at - 2
            if verify == "coupled" or temperature == 0:
                assert result.token_ids == wanted.token_ids


def test_broken_rows_in_other_branches_change_nothing() -> None:
    """Rows that the text does not reach may be broken: siblings of the path, and what follows them."""
    good = chain()
    wanted = plain([1, 2], SamplingParams(max_tokens=25))
    text = [1, 2, *wanted]

    def logits(prefix: tuple[int, ...]) -> list[float]:
        return good(prefix) if list(prefix) == text[: len(prefix)] else [float("nan")] * V

    for seed in range(6):
        engine = Engine(target=TableModel(logits, V), drafter=Bushy(seed, hit=0.6), k=8)
        [result] = engine.generate([[1, 2]], SamplingParams(max_tokens=25))
        assert result.token_ids == wanted
        assert result.stats.num_accepted_draft_tokens > 3


def test_trees_and_chains_share_a_batch_and_memory_that_runs_out() -> None:
    from test_engine_faults import Small

    class Mixed(Bushy):
        def propose(self, request: DraftRequest, k: int) -> Draft:
            return super().propose(request, k) if int(request.id[1:]) % 2 else inner.propose(request, k)

    inner = oracle(wrong=lambda position: position % 3 == 0)
    prompts = [[i, 1, 2] for i in range(6)]
    params = SamplingParams(max_tokens=20)
    for target in (model(), Small(chain(), V)):
        results = Engine(target=target, drafter=Mixed(8), k=5).generate(prompts, params)
        assert [r.token_ids for r in results] == [plain(p, params) for p in prompts]


def test_statistics_count_nodes_for_cost_and_depth_for_position() -> None:
    class Fixed(Drafter):
        def propose(self, request: DraftRequest, k: int) -> Draft:
            a, b = ((request.ids[-1] + i) % 5 for i in (1, 2))
            return Draft((9, a, b, 9, 9, 9)[:k], None, (-1, -1, 1, 0, 0, 0)[:k])

    count = TableModel(lambda prefix: [float(i == (prefix[-1] + 1) % 5) for i in range(10)], 10)
    [result] = Engine(target=count, drafter=Fixed(), k=6).generate([[0]], SamplingParams(max_tokens=13))
    spec = result.metrics["speculative_decoding"]
    # After the plain first token: two accepted and one written, three times; then trees cut by the budget.
    assert spec["per_step_drafted"][:4] == [0, 6, 6, 5]
    assert spec["per_step_accepted"][:4] == [0, 2, 2, 2]
    assert len(spec["acceptance_rate_per_position"]) == 2
    assert spec["acceptance_rate_per_position"][0] == 1.0
    assert result.token_ids == [(i + 1) % 5 for i in range(13)]
    assert result.kinds[:4] == ["plain", "accepted", "accepted", "bonus"]
    assert all(a.positions <= a.drafted for a, _ in pairwise(result.stats.trace))


def test_broken_trees_cost_the_drafter_its_request(caplog: pytest.LogCaptureFixture) -> None:
    for parents in ((0, -1, -1), (-1, -1), (-2, 0, 1), (-1, 2, 0)):

        class Wild(Drafter):
            def propose(self, request: DraftRequest, k: int) -> Draft:
                return Draft((1, 2, 3), None, parents)  # noqa: B023

        caplog.clear()
        params = SamplingParams(max_tokens=10)
        [result] = Engine(target=model(), drafter=Wild(), k=3).generate([[1]], params)
        assert result.token_ids == plain([1], params)
        assert "does not follow an earlier one" in caplog.text


def test_a_target_that_cannot_read_trees_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    target = model()
    target.tree_problem = "its windows follow memory"  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=30)
    [result] = Engine(target=target, drafter=Bushy(1), k=8).generate([[1, 2]], params)
    assert result.token_ids == plain([1, 2], params)
    assert "cannot read: its windows follow memory" in caplog.text
