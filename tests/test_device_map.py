"""Layers on several devices: the adapter's model, distributed by accelerate, writes the text of one device."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import fresh, make_hf, random_tokens

from foredraft import Engine, SamplingParams
from foredraft.errors import ConfigError
from foredraft.models import hf_devices
from foredraft.models.hf import HfTarget
from foredraft.models.loading import load_model

LOAD: dict[str, Any] = {"dtype": "float32", "cache_bytes": 1 << 26}
PARTED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "llama"
    make_hf("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole(model: Path) -> Any:
    return load_model(model, device_map={"": "cpu"}, **LOAD)


@pytest.mark.parametrize("how", ["map", "file", "auto"])
def test_parted_layers_write_the_same_text(how: str, model: Path, whole: Any, tmp_path: Path) -> None:
    device_map: Any = PARTED if how == "map" else how
    if how == "file":
        (tmp_path / "map.json").write_text(json.dumps(PARTED))
        device_map = str(tmp_path / "map.json")
    parted = load_model(model, device_map=device_map, **LOAD)
    assert isinstance(parted.target, HfTarget)
    if how != "auto":  # which puts all on one device where there is no other
        assert set(parted.target.model.hf_device_map.values()) == {"cpu", "disk"}
        # layers on disk hold no numbers between passes
        assert parted.target.model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    tokens = random_tokens(20)
    assert torch.equal(fresh(parted.target, tokens), fresh(whole.target, tokens))
    prompts = [tokens, [7, 8, 9] * 6]
    for params in (
        SamplingParams(max_tokens=15, ignore_eos=True),
        SamplingParams(max_tokens=15, temperature=1, seed=4, ignore_eos=True),
    ):
        want = Engine(whole).generate(prompts, params)
        for drafter in (f"model:{model}", f"tree:{model},depth=2,branch=2,nodes=5"):
            got = Engine(parted, drafter, k=3).generate(prompts, params)
            assert [r.token_ids for r in got] == [r.token_ids for r in want]
            assert sum(r.stats.num_accepted_draft_tokens for r in got) > 5


def test_taps_come_from_every_device(model: Path, whole: Any) -> None:
    from foredraft.models.base import Segment

    parted = load_model(model, device_map=PARTED, **LOAD).target
    found = []
    for target in (parted, whole.target):
        slot = target.cache.allocate()
        found.append(target.forward([Segment(slot, random_tokens(9))], taps=(0, 2, 4)).taps[0])
        target.cache.commit(slot, 9)
        target.cache.free(slot)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device_map": "everywhere"}, "device_map: 'everywhere' is neither auto, balanced"),
        ({"device_map": {"model": 1.5}}, "device_map: must say for each module"),
        ({"device_map": "auto", "device": "cpu"}, "device: device_map says where"),
        ({"device_map": "auto", "tensor_parallel": 2}, "tensor_parallel: this model cannot be split"),
        ({"device_map": "auto", "activations": "int8"}, "activations: only float32"),
        ({"device_map": "auto", "layers": 2}, "layers: cannot drop layers"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], problem: str, model: Path) -> None:
    with pytest.raises(Exception, match=problem):
        load_model(model, **{**LOAD, **options})


def test_without_accelerate(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install accelerate"):
        hf_devices.map_options("auto")
