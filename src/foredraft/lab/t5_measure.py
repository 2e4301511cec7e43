"""What the encoder–decoder study measures: costs of calls, whole generations, and the law of what is written."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from tokenizers import Tokenizer

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.encoder_decoder import EncoderDecoderDrafter
from foredraft.drafters.lookup import LookupDrafter
from foredraft.engine.result import Result
from foredraft.lab.progress import Progress
from foredraft.lab.stats import fit_alpha, predicted_speedup, ratio_interval
from foredraft.lab.t5_schema import CallCosts, LawCheck, LengthRow, PairRow, Strip, T5Law
from foredraft.lab.t5_task import END, START, TASKS, Example, Passages, show
from foredraft.models.base import Segment
from foredraft.models.encoder_decoder import EncoderDecoderTarget
from foredraft.testing.stats import total_variation, two_sample

TEMPERATURES = (0.0, 1.0)
Models = Mapping[str, EncoderDecoderTarget]
"""``target``, ``base`` and ``small``."""


def params(temperature: float, seed: int, tokens: int) -> SamplingParams:
    """An answer ends at the end token and never holds the start token."""
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=tokens,
        min_tokens=2,  # the first is written by the prompt's pass, which verifies nothing
        stop_token_ids=(END,),
        bad_token_ids=((START,),),
    )


def call_costs(models: Models, example: Example, ks: Sequence[int], calls: int, progress: Progress) -> CallCosts:
    """Times every kind of call in turns: target calls of 1 and of k+1 rows, drafters' of one, all encoders'."""
    rows = sorted({1, *(k + 1 for k in ks)})
    jobs: dict[tuple[str, int], Callable[[], None]] = {}
    slots = {name: _reading(model, example) for name, model in models.items()}
    for name, model in models.items():
        for n in rows if name == "target" else [1]:
            jobs[name, n] = _pass(model, slots[name], example.answer[:n])
        jobs[name, 0] = _encoding(model, example.source)
    times: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    names = list(jobs)
    progress.stage("costs of calls", calls)
    for number in range(calls + 3):
        for turn in range(len(names)):
            job = names[(turn + number) % len(names)]
            start = time.perf_counter()
            jobs[job]()
            if number >= 3:  # the first ones warm up
                times[job].append(1e3 * (time.perf_counter() - start))
        progress.advance(int(number >= 3))
    for name, model in models.items():
        model.cache.free(slots[name])
    medians = {job: statistics.median(found) for job, found in times.items()}
    return CallCosts(
        target_ms={n: medians["target", n] for n in rows},
        draft_ms={name: medians[name, 1] for name in models if name != "target"},
        encoder_ms={name: medians[name, 0] for name in models},
        calls=calls,
        threads=torch.get_num_threads(),
    )


def _reading(model: EncoderDecoderTarget, example: Example) -> int:
    """A slot that has read the source and half an answer."""
    slot = model.cache.allocate()
    read = [*example.prompt, *example.answer[: len(example.answer) // 2]]
    model.forward([Segment(slot, read, len(read))])
    model.cache.commit(slot, len(read))
    return slot


def _pass(model: EncoderDecoderTarget, slot: int, tokens: Sequence[int]) -> Callable[[], None]:
    def run() -> None:
        model.forward([Segment(slot, list(tokens))])
        model.cache.commit(slot, 0)

    return run


def _encoding(model: EncoderDecoderTarget, source: Sequence[int]) -> Callable[[], None]:
    ids = torch.tensor([list(source)])

    def run() -> None:
        with torch.no_grad():
            model.model.get_encoder()(input_ids=ids)

    return run


@dataclass
class Runs:
    """What one drafter did with one draft length (0: plain decoding), a number a round."""

    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    def per_token(self) -> list[float]:
        """Seconds a token of each round: sampled texts of one source differ in length."""
        return [seconds / len(text) for seconds, text in zip(self.seconds, self.texts, strict=True)]

    def take(self, result: Result, seconds: float) -> None:
        self.seconds.append(seconds)
        self.texts.append(result.token_ids)
        self.steps += result.stats.num_steps
        steps = [(step.drafted, step.accepted) for step in result.stats.trace]
        if len(result.token_ids) < sum(accepted + 1 for _, accepted in steps):
            steps[-1] = (steps[-1][1],) * 2  # the end token was drafted and accepted: what lay behind it was not judged
        for drafted, accepted in steps:
            if drafted:
                self.drafted.append(drafted)
                self.accepted.append(accepted)


def races(
    models: Models,
    held_out: Passages,
    costs: CallCosts,
    *,
    ks: Sequence[int],
    rounds: int,
    tokens: int,
    seed: int,
    progress: Progress,
) -> list[PairRow]:
    """Every drafter with every draft length, and plain decoding, on the same sources in turns."""
    engines = {name: _engine(models["target"], drafter) for name, drafter in _drafters(models).items()}
    rows: list[PairRow] = []
    for task, temperature in product(TASKS, TEMPERATURES):
        progress.stage(f"{task}, temperature {temperature:g}", rounds)
        generator = torch.Generator().manual_seed(seed + 1)
        settings = [("plain", 0), *product([name for name in engines if name != "plain"], ks)]
        runs = {setting: Runs() for setting in settings}
        for number in range(-1, rounds):  # round -1 warms up
            example = held_out.example(task, generator)
            shift = number % len(settings)
            for name, k in [*settings[shift:], *settings[:shift]]:
                speculation = SpeculationConfig(k=k, verify="rejection")
                start = time.perf_counter()
                [result] = engines[name].generate(
                    [example.prompt],
                    params(temperature, seed + 1000 * (number + 1) + k, tokens),
                    speculation=speculation,
                )
                if number >= 0:
                    runs[name, k].take(result, time.perf_counter() - start)
            progress.advance(int(number >= 0))
        rows += [_pair(task, temperature, name, ks, runs, costs, seed) for name in engines if name != "plain"]
    return rows


def _drafters(models: Models) -> dict[str, Drafter | None]:
    return {
        "plain": None,
        "small": EncoderDecoderDrafter(models["small"]),
        "base": EncoderDecoderDrafter(models["base"]),
        "lookup": LookupDrafter(3, 1),
    }


def _engine(target: EncoderDecoderTarget, drafter: Drafter | None) -> Engine:
    return Engine(target=target, drafter=drafter, max_batch=1, prefix_reuse=False)


def _pair(
    task: str,
    temperature: float,
    drafter: str,
    ks: Sequence[int],
    runs: Mapping[tuple[str, int], Runs],
    costs: CallCosts,
    seed: int,
) -> PairRow:
    plain = runs["plain", 0]
    mine = [runs[drafter, k] for k in ks]
    alpha = fit_alpha([a for run in mine for a in run.accepted], [d for run in mine for d in run.drafted])
    one = costs.target_ms[1]
    c = costs.draft_ms.get(drafter, 0.0) / one
    lengths = []
    for k, run in zip(ks, mine, strict=True):
        measured, interval = ratio_interval(plain.per_token(), run.per_token(), seed)
        lengths.append(
            LengthRow(
                k=k,
                tokens_per_step=run.tokens / run.steps,
                predicted=predicted_speedup(alpha, k, c),
                priced=predicted_speedup(alpha, k, c, costs.target_ms[k + 1] / one),
                measured=measured,
                measured_interval=interval,
            )
        )
    return PairRow(
        task=task,
        temperature=temperature,
        drafter=drafter,
        alpha=alpha,
        c=c,
        best_k=max(lengths, key=lambda row: row.measured).k,
        predicted_best_k=max(lengths, key=lambda row: row.predicted).k,
        lengths=tuple(lengths),
        texts=sum(len(run.texts) for run in mine),
        identical=sum(a == b for run in mine for a, b in zip(run.texts, plain.texts, strict=True)),
    )


def law_check(
    models: Models,
    held_out: Passages,
    tokenizer: Tokenizer,
    task: str,
    *,
    sources: int,
    samples: int,
    tokens: int,
    seed: int,
    progress: Progress,
) -> T5Law:
    """Draws short texts of one source with each drafter and without, and compares the two sets.

    The last row draws from the small drafter alone: a test that could not tell it from the target would prove nothing.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    found = [held_out.example(task, generator) for _ in range(sources)]  # type: ignore[arg-type]
    distances = [_distance(models, example, tokens) for example in found]
    worst = max(range(sources), key=distances.__getitem__)
    prompt = found[worst].prompt
    ways: dict[str, tuple[EncoderDecoderTarget, Drafter | None]] = {
        "plain": (models["target"], None),
        "small": (models["target"], EncoderDecoderDrafter(models["small"])),
        "base": (models["target"], EncoderDecoderDrafter(models["base"])),
        "lookup": (models["target"], LookupDrafter(3, 1)),
        "plain again": (models["target"], None),
        "the small drafter alone": (models["small"], None),
    }
    progress.stage(f"law of {task}", samples * len(ways))
    tallies: dict[str, Counter[tuple[int, ...]]] = {}
    for number, (name, (model, drafter)) in enumerate(ways.items()):
        engine = Engine(target=model, drafter=drafter, k=2, max_batch=1, verify="rejection")
        tallies[name] = Counter()
        for sample in range(samples):
            [result] = engine.generate([prompt], params(1.0, seed + 1_000_000 * (number + 1) + sample, tokens))
            tallies[name][tuple(result.token_ids)] += 1
            progress.advance(1, name)
    plain = tallies.pop("plain")
    rows = []
    for name, tally in tallies.items():
        texts = sorted({*plain, *tally})
        a, b = [plain[text] for text in texts], [tally[text] for text in texts]
        test = two_sample(a, b)
        rows.append(LawCheck(drawn_by=name, samples=samples, tv=total_variation(a, b), p_value=test.p_value))
    source = show(tokenizer, found[worst].source, held_out.creole)
    return T5Law(task=task, source=source, tokens=tokens, model_tv=distances[worst], rows=tuple(rows))


def _distance(models: Models, example: Example, tokens: int) -> float:
    """Mean total variation between target and small drafter at the right answer's first places."""
    read = [*example.prompt, *example.answer[: tokens - 1]]
    laws = []
    for name in ("target", "small"):
        cache = models[name].cache
        slot = cache.allocate()
        logits = models[name].forward([Segment(slot, read, len(example.source))]).logits[0]
        laws.append(torch.softmax(logits.double(), -1))
        cache.commit(slot, 0)
        cache.free(slot)
    return float((laws[0] - laws[1]).abs().sum(-1).mean() / 2)


def examples(models: Models, held_out: Passages, tokenizer: Tokenizer, tokens: int, seed: int) -> tuple[Strip, ...]:
    """One source of each task with what the target makes of it."""
    generator = torch.Generator().manual_seed(seed + 3)
    engine = _engine(models["target"], None)
    strips = []
    for task in TASKS:
        example = held_out.example(task, generator)
        [result] = engine.generate([example.prompt], params(0.0, 0, tokens))
        text = [show(tokenizer, ids, held_out.creole) for ids in (example.source, result.token_ids, example.answer)]
        strips.append(Strip(task=task, source=text[0], answer=text[1], right=text[2]))
    return tuple(strips)
