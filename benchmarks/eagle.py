"""How well the embedded EAGLE-3 head drafts, beside lookup: acceptance by position, tokens a pass, speed.

Prompts of every category of ``foredraft bench``, none of which the head was trained on; chains of 1, 3 and 5 tokens
with four bits of each of the head's weights, one of 5 with eight, chains that end by themselves, a spine of 8 (a chain
with siblings) and a tree of 16, greedy and at temperature 1 (block verification, which for trees is traversal). The
methods take turns prompt by prompt, so that a disturbance meets all of them alike. Results go to
``results/eagle.json``, a part a category and temperature; finished parts stay.
The part "costs of a step" tells what a step of the head takes beside a pass of the target.

    python benchmarks/eagle.py [--prompts 4] [--tokens 128] [--head FOLDER] [--activations float32]
        [--dtype bfloat16] [--name eagle] [--fresh]
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import torch
from record import Record

from foredraft import Engine, SamplingParams
from foredraft.bench.workloads import Prompt, categories, of_category
from foredraft.config import SpeculationConfig
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_head import EagleHead, HeadSegment
from foredraft.engine.stats import SpecStats
from foredraft.kernels.law import Draws
from foredraft.models.base import Segment
from foredraft.models.loading import load_model

METHODS = {  # HEAD stands for the folder of a head, if one is given, EIGHT for that with eight bits a weight
    "plain": (None, 0),
    "lookup k=5": ("lookup", 5),
    "eagle3 k=1": ("eagle3HEAD", 1),
    "eagle3 k=3": ("eagle3HEAD", 3),
    "eagle3 k=5": ("eagle3HEAD", 5),
    "eagle3 k=5, 8 bits": ("eagle3EIGHT", 5),
    "eagle3 k=auto": ("eagle3HEAD", "auto"),
    "spine of 8": ("tree:eagle3HEAD", 8),
    "spine, k=auto": ("tree:eagle3HEAD", "auto"),
    "tree of 16": ("tree:eagle3HEAD,beam=4", 16),
}


def measure(engines: dict[str, Engine], prompts: list[Prompt], temperature: float, tokens: int) -> dict[str, Any]:
    """One category at one temperature: figures a method."""
    stats = {name: SpecStats() for name in METHODS}
    seconds, written = dict.fromkeys(METHODS, 0.0), dict.fromkeys(METHODS, 0)
    differ = 0
    for number, prompt in enumerate(prompts):
        texts = []
        for name, (_, k) in METHODS.items():
            engine = engines[name]
            assert engine.tokenizer is not None
            ids = engine.tokenizer.chat(prompt.messages)
            params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=number)
            speculation = SpeculationConfig(k=k, verify="block")  # type: ignore[arg-type]
            started = time.perf_counter()
            result = engine.generate([ids], params, speculation=speculation)[0]
            seconds[name] += time.perf_counter() - started - result.timings.prefill_s
            written[name] += len(result.token_ids)
            stats[name].merge(result.stats)
            texts.append(result.token_ids)
        differ += temperature == 0 and any(text != texts[0] for text in texts)
    rows = {}
    for name in METHODS:
        own = stats[name]
        reached = [own.num_spec_steps, *own.accepted_per_position()]
        rows[name] = {
            "tokens_per_pass": own.tokens_per_step,
            "mean_acceptance_length": own.mean_acceptance_length,
            "alpha_by_position": [b / a for a, b in pairwise(reached) if a],
            "tokens_per_second": written[name] / seconds[name],
            "speedup": written[name] / seconds[name] * seconds["plain"] / written["plain"],
        }
    return {"prompts": len(prompts), "greedy_texts_that_differ": differ, "methods": rows}


def step_costs(engine: Engine, head: EagleHead, context: int = 200, tries: int = 200) -> dict[str, Any]:
    """Milliseconds, the least of many: a target pass over one row, a step of the head, a whole draft of five tokens.

    They take turns, each behind ``context`` tokens, and a target pass comes before each step, as when drafting.
    """
    target, ids, layers = engine.target, [1 + i % 1000 for i in range(context + 1)], head.shape.taps
    slot, state = target.cache.allocate(), head.new_state()
    [taps] = target.forward([Segment(slot, ids[:context], logits_from=context)], layers).taps
    target.cache.commit(slot, context)
    head.step([HeadSegment(state, ids[1:], taps, logits_from=context)])
    state.commit(context)
    feature = head.fuse(taps[-1:])

    def one_pass() -> None:
        target.forward([Segment(slot, ids[:1])], layers)
        target.cache.commit(slot, 0)

    runs = {
        "target_pass_ms": one_pass,
        "head_step_ms": lambda: head.step([HeadSegment(state, ids[:1], feature)]),
        "draft_of_5_ms": lambda: head.draft([HeadSegment(state, ids[:1], taps[-1:])], [Draws(5)]),
    }
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(tries):
        for name, run in runs.items():
            if name != "target_pass_ms":
                one_pass()
            started = time.perf_counter()
            run()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - started))
            state.drop()
    target.cache.free(slot)
    one = least["target_pass_ms"]
    shares = {"step_alone": least["head_step_ms"] / one, "token_of_a_draft_of_5": least["draft_of_5_ms"] / 5 / one}
    return {**least, "share_of_target_pass": shares, "context": context, "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="a category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--head", default="", help="folder of another head")
    parser.add_argument("--activations", default="float32")
    parser.add_argument("--dtype", default="auto", help="bfloat16 or float32 dequantises the weights")
    parser.add_argument("--name", default="eagle")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    loaded = load_model("smollm2-135m", activations=options.activations, dtype=options.dtype)
    record = Record(options.name, options.fresh)
    record.data["settings"] = vars(options)
    own = f":{options.head}" if options.head else ""
    eight = f"{own},bits=8" if own else ":bits=8"
    made = {
        drafter: Engine(loaded, drafter and drafter.replace("HEAD", own).replace("EIGHT", eight), prefix_reuse=False)
        for drafter in {drafter for drafter, _ in METHODS.values()}
    }
    engines = {name: made[drafter] for name, (drafter, _) in METHODS.items()}
    if not record.has("costs of a step"):
        drafter = made["eagle3HEAD"].drafter
        assert isinstance(drafter, Eagle3Drafter)
        record.put("costs of a step", step_costs(made["eagle3HEAD"], drafter.head))
    for temperature in (0.0, 1.0):
        for category in categories():
            part = f"{category}, T={temperature:g}"
            if record.has(part):
                continue
            found = measure(engines, of_category(category)[: options.prompts], temperature, options.tokens)
            record.put(part, found)
            best = found["methods"]
            print(part, {n: (round(r["tokens_per_pass"] or 1, 2), round(r["speedup"], 2)) for n, r in best.items()})


if __name__ == "__main__":
    main()
