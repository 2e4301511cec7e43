"""EAGLE-1 heads: the published layout is read as its authors run it; whatever it drafts, the text is the target's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import models_support
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from foredraft import Engine, SamplingParams
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.eagle1 import Eagle1Drafter, Eagle1Head, Eagle1Nodes
from foredraft.drafters.eagle1_checkpoint import build_eagle1, embedding_of, load_eagle1
from foredraft.drafters.eagle_head import HeadSegment
from foredraft.drafters.registry import create
from foredraft.drafters.tree import TreeDrafter
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.testing.stats import two_sample

PROMPTS = [models_support.random_tokens(n, seed=n) for n in (1, 3, 40, 9)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return models_support.make_hf("llama")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    found: Decoder = models_support.save_and_load(model, tmp_path_factory.mktemp("llama"))
    return found


def layer_config() -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
    )
    config._attn_implementation = "eager"
    return config


class Published(nn.Module):
    """The layer as its authors describe it, built from transformers' parts."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = layer_config()
        self.fc = nn.Linear(128, 64, bias=bias)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        for name, weight in self.named_parameters():
            weight.data.normal_(1.0 if "norm" in name else 0.0, 0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5)

    @torch.no_grad()
    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """``[T, d]`` each -> the features ``[T, d]`` that it foresees."""
        joined = self.fc(torch.cat([embedded, features], -1))[None]
        length = joined.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        out = self.layers[0](joined, attention_mask=mask, position_embeddings=self.rotary(joined, places))
        return (out[0] if isinstance(out, tuple) else out).view(length, -1)


def write(folder: Path, bias: bool = True, **changes: object) -> Published:
    made = Published(bias)
    config = layer_config().to_dict() | {"bias": bias, "architectures": ["LlamaForCausalLM"]} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, folder / "model.safetensors")
    return made


def head_for(target: Decoder, folder: Path, bias: bool = True) -> Eagle1Head:
    write(folder, bias)
    shape, _, embed, reader = load_eagle1(folder, target)
    return Eagle1Head(shape, build_eagle1(shape, load_file(folder / "model.safetensors"), target, 32), embed, reader)


@pytest.fixture
def head(target: Decoder, tmp_path: Path) -> Eagle1Head:
    return head_for(target, tmp_path / "head")


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_published_checkpoint_says_what_its_authors_layer_says(
    model: nn.Module, target: Decoder, tmp_path: Path, bias: bool
) -> None:
    """Feature: output of the final norm, as ``transformers`` gives it; logits: the target's LM head on the outcome."""
    head = head_for(target, tmp_path, bias)
    tokens = models_support.random_tokens(12, seed=4)
    ids = torch.tensor([tokens])
    features = model.model(ids).last_hidden_state[0]  # type: ignore[operator,union-attr]
    embedded = model.get_input_embeddings()(ids[0, 1:])  # type: ignore[operator]
    reference = Published(bias)
    foreseen = reference(embedded[:8], features[:8])
    wanted = model.lm_head(foreseen)  # type: ignore[operator]
    slot = target.cache.allocate()
    taps = target.forward([Segment(slot, tokens)], (target.shape.layers,)).taps[0]
    target.cache.free(slot)
    state = head.new_state()
    logits, hidden = head.step([HeadSegment(state, tokens[1:9], head.fuse(taps[:8]))])
    assert torch.allclose(hidden[0], foreseen, atol=1e-4)
    assert torch.allclose(logits[0], wanted, atol=1e-3)
    state.commit(8)
    own = torch.cat([features[:8], foreseen[-1:]])  # further on its own outcome is the feature
    further = reference(embedded[:9], own)
    logits, hidden = head.step([HeadSegment(state, tokens[9:10], hidden[0][-1:])])
    assert torch.allclose(hidden[0], further[-1:], atol=1e-4)


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_text_is_the_targets(target: Decoder, head: Eagle1Head, k: int) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = Engine(target).generate(PROMPTS, params)
    drafted = Engine(target, Eagle1Drafter(head), k=k, max_step_tokens=16).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_tokens > 0 for r in drafted)


@pytest.mark.parametrize("make", [lambda h: Eagle1Drafter(h), lambda h: TreeDrafter(Eagle1Nodes(h), depth=3, branch=3)])
def test_a_seed_gives_the_text_of_plain_decoding(
    target: Decoder, head: Eagle1Head, make: Callable[[Eagle1Head], Eagle1Drafter]
) -> None:
    for params in (
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ):
        plain = Engine(target).generate(PROMPTS, params)
        drafted = Engine(target, make(head), k=6).generate(PROMPTS, params)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert sum(r.stats.num_draft_tokens for r in drafted) > 50


def test_one_branch_drafts_the_chain(target: Decoder, head: Eagle1Head) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    chain = Engine(target, Eagle1Drafter(head), k=4).generate(PROMPTS, params)
    tree = Engine(target, TreeDrafter(Eagle1Nodes(head), branch=1), k=4).generate(PROMPTS, params)
    assert [r.stats.trace for r in tree] == [r.stats.trace for r in chain]


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_the_law_is_the_targets(target: Decoder, head: Eagle1Head, verify: str) -> None:
    params = SamplingParams(temperature=1.0, top_k=4, max_tokens=3, ignore_eos=True)
    counts = []
    for drafter in (None, Eagle1Drafter(head)):
        engine = Engine(target, drafter, k=2, verify=verify, max_batch=16)
        counts.append([r.token_ids for r in engine.generate([PROMPTS[1]] * 1200, params)])
    kinds = sorted({tuple(text) for texts in counts for text in texts})
    table = [[float(texts.count(list(kind))) for kind in kinds] for texts in counts]
    assert two_sample(*table).p_value > 1e-4


def test_the_registry_knows_it_as_chain_and_as_tree(target: Decoder, tmp_path: Path) -> None:
    write(tmp_path)
    context = DrafterContext(target, None, 1)
    assert isinstance(create(f"eagle1:{tmp_path}", context), Eagle1Drafter)
    tree = create(f"tree:eagle1:{tmp_path},depth=3", context)
    assert isinstance(tree, TreeDrafter)
    assert isinstance(tree.scorer, Eagle1Nodes)
    with pytest.raises(ConfigError, match="eagle1:FOLDER"):
        create("eagle1", context)


def test_its_own_embedding_is_used(target: Decoder) -> None:
    table = torch.randn(101, 64)
    assert torch.equal(embedding_of({"embed_tokens.weight": table}, target)(torch.tensor([3])), table[3:4])
    assert torch.equal(embedding_of({}, target)(torch.tensor([3])), target.embed(torch.tensor([3])))


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers: must be 1"),
        ({}, {"layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias: is not part of an EAGLE-1 layer"),
        ({}, {"layers.0.hidden_norm.weight": torch.ones(64)}, "eagle3:FOLDER"),
        ({}, {"fc.weight": torch.zeros(64, 64)}, r"must be \[64, 128\] \(got \[64, 64\]\)"),
        ({"vocab_size": 50}, {}, "made for a target of vocabulary 50"),
        ({"target_mark": [(-1.0) ** i for i in range(64)]}, {}, "another model of the same size"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: Decoder, tmp_path: Path, changes: dict[str, object], tensors: dict[str, Tensor], said: str
) -> None:
    write(tmp_path, **changes)
    save_file(load_file(tmp_path / "model.safetensors") | tensors, tmp_path / "model.safetensors")
    with pytest.raises(ForedraftError, match=said):
        load_eagle1(tmp_path, target)


def test_pickles_are_refused(target: Decoder, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="convert it to safetensors"):
        load_eagle1(tmp_path, target)


def test_a_head_of_another_target_is_refused(target: Decoder, head: Eagle1Head) -> None:
    head.shape = dataclasses.replace(head.shape, vocab=7)
    with pytest.raises(ForedraftError, match="made for a target of vocabulary 7"):
        Engine(target, Eagle1Drafter(head))
