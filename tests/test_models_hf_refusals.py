"""What the transformers adapter refuses, why it says it does, and that its test of the model really bites."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from foredraft.errors import ConfigError, ModelLoadError, NumericalError, UnsupportedModelError
from foredraft.models import hf_load, hf_probe
from foredraft.models.base import Segment
from foredraft.models.hf import HfTarget, load_hf
from foredraft.models.hf_load import quiet_transformers

V = 61
SMALL: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION: dict[str, Any] = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**config, **IDS, **changes})).eval()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tf.MambaConfig(**SMALL), "layer 0 keeps its past in a LinearAttentionLayer, a running state"),
        (lambda: tf.RwkvConfig(**SMALL, attention_hidden_size=32), "RwkvForCausalLM takes no cache of keys and values"),
        (lambda: tf.Lfm2Config(**ATTENTION, layer_types=["full_attention", "conv"]), "layer 1 keeps its past"),
        (lambda: tf.JambaConfig(**ATTENTION, attn_layer_period=2, attn_layer_offset=1, num_experts=2), "layer 0 keeps"),
        (
            lambda: tf.Qwen3NextConfig(
                **ATTENTION, layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2
            ),
            "layer 0 keeps its past",
        ),
        (lambda: tf.BertConfig(**SMALL, num_attention_heads=2, intermediate_size=48), "does not use the cache"),
    ],
)
def test_models_that_cannot_be_rolled_back_are_refused(config: Any, reason: str) -> None:
    with quiet_transformers():
        model = tf.AutoModelForCausalLM.from_config(config())
    with pytest.raises(UnsupportedModelError, match=reason):
        HfTarget(model)


def test_encoder_decoders_are_refused_for_now() -> None:
    config = tf.T5Config(vocab_size=V, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, **IDS)
    with pytest.raises(UnsupportedModelError, match="t5 has an encoder and a decoder"):
        HfTarget(tf.T5ForConditionalGeneration(config))


class Remembering(tf.GPT2LMHeadModel):  # type: ignore[misc]
    """Looks like a GPT-2, but adds the sum of all embeddings that it ever saw: state outside the cache."""

    def forward(self, input_ids: Tensor, cache: Any = None, use_cache: bool = True, **kwargs: Any) -> Any:
        start = cache.get_seq_length() if cache is not None else 0
        if start == 0:
            self.seen = torch.zeros(32)
        output = super().forward(input_ids=input_ids, cache=cache, use_cache=use_cache, **kwargs)
        embedded = self.transformer.wte(input_ids)[0].cumsum(0) + self.seen
        self.seen = embedded[-1]
        output.logits = output.logits + self.lm_head(embedded)[None, -output.logits.shape[1] :]
        return output


class LookingAhead(tf.GPT2LMHeadModel):  # type: ignore[misc]
    """Shifts every row's logits by those of the last one: not causal."""

    def forward(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, cache=cache, **kwargs)
        output.logits = output.logits + output.logits[:, -1:]
        return output


class Failing(tf.GPT2LMHeadModel):  # type: ignore[misc]
    def forward(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        raise KeyError("some\ninner part")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Remembering, "tokens that were rolled back still change the logits"),
        (LookingAhead, "reading a text in two parts gives other logits than reading it at once"),
        (Failing, r"fails on a test text \(KeyError"),
    ],
)
def test_the_test_of_the_model_bites(kind: type, problem: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=problem):
        HfTarget(kind(gpt2().config).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_another_text_are_far_beyond_the_tolerance(dtype: torch.dtype) -> None:
    """The margin of the self-test: one changed token moves later logits by many tolerances, even in 16 bits."""
    target = HfTarget(gpt2().to(dtype))
    with torch.no_grad():
        right = target.call([1, 2, 3, 4, 5, 6]).logits[0].double()
        other = target.call([1, 2, 9, 4, 5, 6]).logits[0].double()
    assert hf_probe.distance(other[3:], right[3:]) > 4 * hf_probe.tolerance(target)
    assert hf_probe.distance(right, right) == 0


def test_weights_that_are_not_numbers_are_named() -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    with pytest.raises(NumericalError, match="logits that are not numbers"):
        HfTarget(model)


def test_a_model_without_a_list_of_layers_has_no_taps() -> None:
    target = HfTarget(gpt2())
    target._layers = None
    slot = target.cache.allocate()
    with pytest.raises(UnsupportedModelError, match="taps: its decoder layers cannot be found"):
        target.forward([Segment(slot, [1])], taps=[1])
    target.forward([Segment(slot, [1])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def logits(target: HfTarget) -> Tensor:
    return target.forward([Segment(target.cache.allocate(), [5, 6, 7])]).logits[0]


def test_a_folder_is_loaded_without_a_word(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = load_hf(str(folder), max_context=32)
    assert target.max_context == 32
    assert target.dtype == torch.float32
    assert torch.equal(logits(target), logits(HfTarget(gpt2())))
    levels = []
    hook = target.model.register_forward_pre_hook(lambda *_: levels.append(tf.utils.logging.get_verbosity()))
    logits(target)
    hook.remove()
    assert levels == [tf.utils.logging.ERROR]  # it would comment on texts that hold the padding token
    assert load_hf(str(folder), "bfloat16").dtype == torch.bfloat16
    assert load_hf(str(folder), torch.float64).dtype == torch.float64
    assert capfd.readouterr() == ("", "")


def test_transformers_own_settings_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    logging = tf.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    with quiet_transformers():
        assert logging.get_verbosity() == logging.ERROR
        print("a progress bar that obeys no setting", file=sys.stderr)
    assert capsys.readouterr().err == ""
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(before)


def test_bad_names_and_folders_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("")
    cases = {
        str(tmp_path / "nowhere"): "no such folder or file",
        str(tmp_path / "nowhere.gguf"): "no such file",
        str(tmp_path / "empty"): "has no config.json",
        str(tmp_path / "note.txt"): "neither a folder nor a .gguf file",
        "nobody/nothing": "not on this machine and the model hub cannot be reached",
    }
    for path, problem in cases.items():
        with pytest.raises(ModelLoadError, match=problem) as caught:
            load_hf(path)
        assert str(caught.value).startswith(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="dtype: must be auto or one of"):
        load_hf(str(folder), "int3")


def test_an_unreachable_hub_is_found_out_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_load.huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hf_load, "getproxies", dict)
    tried = []
    read = tf.AutoModelForCausalLM.from_pretrained

    def spy(where: str, **options: Any) -> Any:
        tried.append(options.get("local_files_only", False))
        return read(where, **options)

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", spy)
    with pytest.raises(ModelLoadError, match="the model hub cannot be reached"):
        load_hf("nobody/nothing")
    assert tried == [True]  # the hub's client, which tries for half a minute, was never asked


def test_incomplete_weights_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 weights are missing.*h\.1\.mlp\.c_fc\.weight"):
        load_hf(str(folder))


def test_broken_and_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="tiny"):
        load_hf(str(folder))
    weights.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="no safetensors weights; convert"):
        load_hf(str(folder))


def test_foreign_code_runs_only_when_asked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(ModelLoadError, match="set trust_remote_code if you trust its source"):
        load_hf(str(folder))
    assert not ran.exists()


def test_unknown_kinds_of_model_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change in ({"model_type": "strange"}, {"model_type": "vit", "architectures": ["ViTModel"]}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModelError, match="knows no causal language model of this kind"):
            load_hf(str(folder))
