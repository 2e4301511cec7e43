"""What is left of an attack by drafts that are always wrong: total throughput, and other tenants' latency.

Two scenarios on the real model, draft length fixed, so that only the guard can help:

- **everybody attacks**: all requests' drafts are wrong. Tokens a second, against plain decoding of the same requests;
- **beside an honest tenant**: two honest requests (prompt lookup) among six, whose time per token is compared with that
  in the same company when the other four decode plainly.

Each is run with the guard, without it, and as its baseline, in turns; the figures are medians of the rounds' ratios.
Tenants are new in every round, so the guard has to notice each time: with longer lives it would be cheaper.

    python benchmarks/attack.py [--rounds 5] [--tokens 200] [--k 4] [--fresh]

Rounds are saved as they finish; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from prompts import CHAT, COPY
from record import Record

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.lookup import LookupDrafter
from foredraft.engine.request import Request
from foredraft.models.loading import LoadedModel, load_model
from foredraft.types import Draft

HONEST, ATTACKERS, ALL = 2, 4, 6


class Attacked(LookupDrafter):
    """Prompt lookup for honest tenants, tokens that are never right for the others."""

    def propose(self, request: DraftRequest, k: int) -> Draft:
        if request.tenant.startswith("attacker"):
            return Draft((3,) * k)  # a special token, which no text holds
        return super().propose(request, k)


class Bench:
    """Engines over one model: with guard, without, and plain."""

    def __init__(self, model: LoadedModel, k: int, tokens: int) -> None:
        self.params = SamplingParams(max_tokens=tokens, ignore_eos=True, bad_token_ids=((3,),))
        self.plain = SpeculationConfig(k=0)
        self.engines = {
            "guarded": Engine(model, Attacked(3, 2), k=k, guard=True, max_batch=ALL, prefix_reuse=False),
            "unguarded": Engine(model, Attacked(3, 2), k=k, max_batch=ALL, prefix_reuse=False),
        }
        self._round = 0

    def run(self, engine: Engine, honest: int, attack: bool) -> tuple[float, float, list[list[int]]]:
        """Decodes six requests together.

        Returns:
            Seconds in all, seconds a token of the honest requests, and all texts.
        """
        assert engine.tokenizer is not None
        self._round += 1
        requests = []
        for n in range(ALL):
            name = "honest" if n < honest else "attacker"
            prompt = engine.tokenizer.chat([{"role": "user", "content": (COPY if n < honest else CHAT)[n % 4]}])
            speculation = self.plain if name == "attacker" and not attack else None
            requests.append(engine.submit(prompt, self.params, speculation=speculation, tenant=f"{name} {self._round}"))
        started = time.perf_counter()
        ends: dict[str, float] = {}
        while not all(request.finished for request in requests):
            engine.step()
            for request in requests:
                if request.finished:
                    ends.setdefault(request.id, time.perf_counter())
        each = [(ends[r.id] - started) / r.written for r in requests[:honest]]
        return time.perf_counter() - started, statistics.mean(each) if each else 0.0, _texts(requests)


def _texts(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output) for request in requests]


def one_round(bench: Bench, name: str) -> dict[str, float]:
    """Both scenarios with one engine, each beside its baseline."""
    engine = bench.engines[name]
    plain, _, wanted = bench.run(engine, 0, attack=False)
    before = engine.stats.num_draft_tokens
    attacked, _, got = bench.run(engine, 0, attack=True)
    drafted = engine.stats.num_draft_tokens - before
    assert got == wanted, "an attack changed a text"
    _, alone, wanted = bench.run(engine, HONEST, attack=False)
    _, beside, got = bench.run(engine, HONEST, attack=True)
    assert got == wanted, "an attack changed a text"
    return {
        "throughput_over_plain": plain / attacked,
        "honest_time_per_token_over_no_attack": beside / alone,
        "positions_drafted_by_attackers": drafted,
    }


def summary(parts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of each engine."""
    found: dict[str, dict[str, float]] = {}
    for name in ("guarded", "unguarded"):
        rounds = [part for key, part in parts.items() if key.split()[0] == name]
        if rounds:
            found[name] = {key: statistics.median(part[key] for part in rounds) for key in rounds[0]}
            found[name]["rounds"] = len(rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--name", default="attack")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    record = Record(args.name, args.fresh)
    settings = {"target": args.target, "k": args.k, "tokens": args.tokens, "requests": ALL}
    if record.data.setdefault("settings", settings) != settings:
        parser.error("the kept rounds had other settings; use --fresh or another --name")
    bench = Bench(load_model(args.target), args.k, args.tokens)
    for engine in bench.engines.values():  # costs are learnt, memory is touched
        bench.run(engine, HONEST, attack=False)
    for number in range(args.rounds):
        for name in bench.engines:
            if not record.has(f"{name} {number}"):
                record.put(f"{name} {number}", one_round(bench, name))
    record.data["summary"] = summary(record.data["parts"])
    record.save()
    for name, found in record.data["summary"].items():
        print(
            f"{name}: {found['throughput_over_plain']:.3f} of plain throughput when everybody attacks; an honest token "
            f"takes {found['honest_time_per_token_over_no_attack']:.3f} times as long beside attackers",
            flush=True,
        )


if __name__ == "__main__":
    main()
