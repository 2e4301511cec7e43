"""The real small model with trees: greedy text is plain text to the last token, alone and beside chains."""

from __future__ import annotations

import pytest
import test_engine_real as real

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters import Drafter, DraftRequest, LookupDrafter
from foredraft.drafters.tree import TreeDrafter
from foredraft.drafters.tree_lookup import LookupTreeDrafter
from foredraft.drafters.tree_model import ModelNodes
from foredraft.kernels import available
from foredraft.models.catalog import resolve
from foredraft.types import Draft, Verdict

TREE = f"tree:{real.TARGET}@28,depth=4,branch=3,nodes=12"
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(resolve(real.TARGET) is None, reason=f"run: foredraft models fetch {real.TARGET}"),
    pytest.mark.skipif(not available(), reason="no compiled kernels"),
]


class Mixed(Drafter):
    """Trees for every other request, chains for the others."""

    name = "mixed"

    def __init__(self, tree: TreeDrafter | LookupTreeDrafter, chain: Drafter) -> None:
        self.parts = (tree, chain)

    def of(self, request: DraftRequest) -> Drafter:
        return self.parts[int(request.id[1:]) % 2]

    def start(self, request: DraftRequest) -> None:
        self.of(request).start(request)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.of(request).propose(request, k)

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: object) -> None:
        self.of(request).observe(request, verdict, taps)  # type: ignore[arg-type]

    def stop(self, request: DraftRequest) -> None:
        self.of(request).stop(request)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_plain_alone_and_beside_chains(dtype: str) -> None:
    made = real.engine(TREE, dtype)
    prompts = real.prompts(made)
    wanted = [ids[: PARAMS.max_tokens] for ids in real.plain(dtype)]
    config = SpeculationConfig(k=12)
    [alone] = made.generate([prompts[0]], PARAMS, speculation=config)
    assert alone.token_ids == wanted[0]
    assert max(s.positions for s in alone.stats.trace) > 1
    assert max(s.drafted for s in alone.stats.trace) > max(s.positions for s in alone.stats.trace)
    drafter = made.drafter
    assert isinstance(drafter, TreeDrafter)
    assert isinstance(drafter.scorer, ModelNodes)
    drafter._states.clear()
    beside = Engine(made.target, Mixed(drafter, LookupDrafter(3, 1)), max_batch=4, prefix_reuse=False)
    results = beside.generate(prompts, PARAMS, speculation=config)
    assert [r.token_ids for r in results] == wanted
    assert any(s.depth > 0 for r in results for s in r.stats.trace)
    assert any(s.drafted and s.depth < 0 for r in results for s in r.stats.trace)


def test_a_seed_gives_the_text_of_plain_decoding() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=14)
    ids = real.prompts(real.engine(None, "float32", 1))[3]
    [wanted] = real.engine(None, "float32", 1).generate([ids], params)
    [result] = real.engine(TREE, "float32").generate([ids], params, speculation=SpeculationConfig(k=12))
    assert result.token_ids == wanted.token_ids
    assert result.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_sampled_trees_on_the_real_model(verify: str) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=12, ignore_eos=True)
    made = real.engine(TREE, "float32")
    config = SpeculationConfig(k=9, verify=verify)  # type: ignore[arg-type]
    [result] = made.generate([real.prompts(made)[3]], params, speculation=config)
    assert len(result.token_ids) == 12
    assert result.stats.num_draft_tokens > 9
