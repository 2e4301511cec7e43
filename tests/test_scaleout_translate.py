"""Our options as vLLM's: a table of what is said how, and of what is refused with which remedy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli

from foredraft.cli.session import EngineOptions
from foredraft.errors import ConfigError
from foredraft.scaleout import translate
from foredraft.scaleout.options import ScaleOptions
from foredraft.scaleout.speculation import Model, find_model
from foredraft.server.config import ServerConfig

ALWAYS = "--host 127.0.0.1 --port 8000 --served-model-name my/model --shutdown-timeout 60 --generation-config vllm"
KEY = "a-key-of-enough-letters"


def launch(drafter: str | None = None, scale: ScaleOptions | None = None, **given: Any) -> translate.Launch:
    return translate.launch("my/model", drafter, given, scale or ScaleOptions(engine="vllm"), {})


def said(**options: Any) -> str:
    """What a launch says beyond what it always says."""
    text = shlex.join(launch(**options).arguments)
    assert text.startswith(ALWAYS)
    return text.removeprefix(ALWAYS).strip()


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    config = {
        "speculators_model_type": "eagle3",
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": {"vocab_size": 100},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"max_context": 4096}, "--max-model-len 4096"),
        ({"cache_bytes": 1 << 30}, "--kv-cache-memory-bytes 1073741824"),
        ({"max_batch": 64}, "--max-num-seqs 64"),
        ({"max_step_tokens": 2048}, "--max-num-batched-tokens 2048"),
        ({"prefix_reuse": True}, "--enable-prefix-caching"),
        ({"prefix_reuse": False}, "--no-enable-prefix-caching"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
        ({"trust_remote_code": False}, ""),
        ({"k": 3, "verify": "auto", "guard": False, "activations": "float32", "stream_smoothing": 0}, ""),
        ({"max_context": None, "request_timeout": None, "device": "auto", "log_prompts": False}, ""),
        ({"tls_certificate": "c.pem", "tls_key": "k.pem"}, "--ssl-certfile c.pem --ssl-keyfile k.pem"),
    ],
)
def test_options_are_said_in_vllms_words(given: dict[str, Any], expected: str) -> None:
    assert said(**given) == expected


def test_the_network_is_always_said() -> None:
    found = launch(host="::1", port=9, served_name="x", drain_timeout=1.5, tls_certificate="c", tls_key="k")
    text = "--host ::1 --port 9 --served-model-name x --shutdown-timeout 2 --generation-config vllm"
    assert shlex.join(found.arguments).startswith(text)
    assert found.url == "https://[::1]:9"
    assert (found.name, found.model) == ("x", "my/model")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel": 4}, "--tensor-parallel-size 4"),
        ({"pipeline_parallel": 2}, "--pipeline-parallel-size 2"),
        ({"data_parallel": 8}, "--data-parallel-size 8"),
        (
            {"tensor_parallel": 8, "pipeline_parallel": 2, "distributed_backend": "ray"},
            "--tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend ray",
        ),
        (
            {"data_parallel": 2, "distributed_backend": "ray"},
            "--data-parallel-size 2 --distributed-executor-backend ray --data-parallel-backend ray",
        ),
        ({"distributed_backend": "mp"}, "--distributed-executor-backend mp"),
        ({"vllm_arg": ("--seed=7", "--enforce-eager")}, "--seed=7 --enforce-eager"),
    ],
)
def test_sizes_of_the_cluster(sizes: dict[str, Any], expected: str) -> None:
    found = launch(scale=ScaleOptions(engine="vllm", **sizes))
    assert shlex.join(found.arguments).removeprefix(ALWAYS).strip() == expected
    assert found.modules == (("ray",) if "ray" in expected else ())


def speculative(drafter: str, **given: Any) -> dict[str, Any]:
    arguments = launch(drafter, **given).arguments
    found: dict[str, Any] = json.loads(arguments[arguments.index("--speculative-config") + 1])
    return found


@pytest.mark.parametrize(
    ("drafter", "k", "expected"),
    [
        ("lookup", None, {"method": "ngram", "num_speculative_tokens": 5, "max": 4, "min": 2}),
        ("lookup:7", 3, {"method": "ngram", "num_speculative_tokens": 3, "max": 7, "min": 2}),
        ("lookup:1", 3, {"method": "ngram", "num_speculative_tokens": 3, "max": 1, "min": 1}),
        ("lookup:5,3", 2, {"method": "ngram", "num_speculative_tokens": 2, "max": 5, "min": 3}),
        ("model:small/one", None, {"method": "draft_model", "model": "small/one", "num_speculative_tokens": 4}),
        ("suffix", 8, {"method": "suffix", "num_speculative_tokens": 8, "requests": 0}),
        (
            "suffix:depth=12,factor=2,min_prob=0.2,pool=0",
            None,
            {"method": "suffix", "num_speculative_tokens": 16, "requests": 0, "depth": 12, "factor": 2.0, "prob": 0.2},
        ),
    ],
)
def test_drafters(drafter: str, k: int | None, expected: dict[str, Any]) -> None:
    long = {
        "max": "prompt_lookup_max",
        "min": "prompt_lookup_min",
        "requests": "suffix_decoding_max_cached_requests",
        "depth": "suffix_decoding_max_tree_depth",
        "factor": "suffix_decoding_max_spec_factor",
        "prob": "suffix_decoding_min_token_prob",
    }
    assert speculative(drafter, k=k) == {long.get(name, name): value for name, value in expected.items()}


def test_a_head_says_its_own_draft_length(head: Path) -> None:
    expected = {"method": "eagle3", "model": str(head.resolve()), "num_speculative_tokens": 7}
    assert speculative(f"eagle3:{head}") == expected
    assert speculative(f"eagle3:{head}", k=2)["num_speculative_tokens"] == 2
    assert speculative("eagle3")["model"].endswith("smollm2-135m-eagle3")
    drawn = speculative(f"eagle3:{head}", verify="rejection")
    assert (drawn["draft_sample_method"], drawn["rejection_sample_method"]) == ("probabilistic", "standard")


def test_without_drafts() -> None:
    assert said(drafter=None) == ""
    assert said(drafter="lookup", k=0) == ""
    assert launch("lookup", k=0).drafter is None


def test_the_shared_pool_is_off_and_that_is_said() -> None:
    assert "shared by all users" in launch("suffix").notes[0]
    assert launch("suffix:pool=0").notes == ()
    assert launch("suffix").modules == ("arctic_inference",)


@pytest.mark.parametrize(
    ("drafter", "why", "remedy"),
    [
        ("tree:eagle3", "chains only", "use eagle3"),
        ("lookup-tree", "chains only", "use eagle3"),
        ("combined:suffix+lookup", "one drafter", "use eagle3"),
        ("early-exit:4", "own layers", "use eagle3"),
        ("vocabulary:small", "not translated", "use eagle3"),
        ("nonsense", "not translated", "use eagle3"),
        ("eagle1:folder", "not translated", "use eagle3"),
        ("lookup:2,3", "not MAX or MAX,MIN", "lookup:4,2"),
        ("lookup:a", "not MAX or MAX,MIN", "lookup:4,2"),
        ("suffix:pool=64", "none by tenant", "pool=0"),
        ("suffix:file=x", "no pool in a file", "drop it"),
        ("suffix:tree", "chains only", "drop it"),
        ("suffix:depth=x", "not depth=NUMBER", "depth=24"),
        ("model", "names no model", "model:FOLDER"),
        ("model:smollm2-135m", "GGUF", "foredraft export smollm2-135m --out smollm2-135m-dense"),
        ("model:small/one@4", "whole", "write model:small/one"),
        ("model:small/one,doubt=1", "one length", "write model:small/one"),
        ("eagle3:small/head,bits=8", "number type", "write eagle3:small/head"),
        ("eagle3:bits=8", "number type", "write eagle3"),
        ("model:./nowhere", "no folder and no hub id", "give a model's folder"),
        ("eagle3:nowhere", "no readable config.json", "give the folder"),
    ],
)
def test_drafters_that_vllm_has_not(drafter: str, why: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        launch(drafter)
    assert error.value.field == "drafter"
    assert remedy in (error.value.remedy or "")


@pytest.mark.parametrize(
    ("entries", "target", "why"),
    [
        ({"speculators_model_type": None}, {}, "not an EAGLE-3 head in the speculators layout"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, {}, "once, in order"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, {}, "once, in order"),
        ({}, {"vocab_size": 101}, "vocabulary 100, this one has 101"),
        ({}, {"hidden_size": 65}, "width 64, this one has 65"),
        ({}, {"num_hidden_layers": 2}, "taps layer 3, the target has 2"),
        ({}, {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3}, None),
    ],
)
def test_a_head_must_fit(head: Path, entries: dict[str, Any], target: dict[str, Any], why: str | None) -> None:
    from foredraft.scaleout.speculation import translate as speculation

    change(head, **entries)
    if why is None:
        assert speculation(f"eagle3:{head}", None, Model("x", target)).config["method"] == "eagle3"
        return
    with pytest.raises(ConfigError, match=why):
        speculation(f"eagle3:{head}", None, Model("x", target))


def test_a_draft_model_must_have_the_targets_vocabulary(tmp_path: Path) -> None:
    for name, size in (("big", 100), ("small", 90)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(ConfigError, match="vocabulary 90, this one has 100"):
        translate.launch(str(tmp_path / "big"), f"model:{tmp_path / 'small'}", {}, ScaleOptions(), {})


ASKING: dict[str, Any] = {
    "guard": True,
    "guard_rate": 0.5,
    "activations": "int8",
    "device": "cuda:1",
    "api_keys": "keys.toml",
    "control_tokens": "refuse",
    "log_prompts": True,
    "public_stats": False,
}


@pytest.mark.parametrize("field", sorted(translate.REFUSED))
def test_what_vllm_has_not_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError) as error:
        launch(**{field: ASKING.get(field, 3)})
    assert error.value.field == field
    assert error.value.remedy
    assert launch(**{field: translate.REFUSED[field][0]}).arguments == launch().arguments


@pytest.mark.parametrize(
    ("field", "value"), [("k", "auto"), ("verify", "block"), ("verify", "coupled"), ("dtype", "float64")]
)
def test_values_that_vllm_has_not(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        launch("lookup", **{field: value})
    assert (error.value.field, bool(error.value.remedy)) == (field, True)


def test_no_option_is_forgotten() -> None:
    """A new option of the server or the engine must be translated or refused: nothing may be ignored."""
    with pytest.raises(ConfigError, match="not translated") as error:
        launch(newest=1)
    assert error.value.field == "newest"
    judged = {*translate.OF_OUR_OWN, *translate.ONE_TO_ONE, *translate.SWITCHES, *translate.REFUSED}
    assert set(ServerConfig.model_fields) | set(EngineOptions.model_fields) <= judged


@pytest.mark.parametrize(
    ("argument", "use"),
    [
        ("--port=9", "that option"),
        ("--served_model_name=x", "that option"),
        ("-tp", "--tensor-parallel"),
        ("--speculative-config={}", "--drafter"),
        ("--api-key=x", "FOREDRAFT_API_KEYS"),
    ],
)
def test_an_argument_may_not_say_again_what_an_option_says(argument: str, use: str) -> None:
    with pytest.raises(ConfigError, match="set by an option of its own") as error:
        launch(scale=ScaleOptions(engine="vllm", vllm_arg=(argument,)))
    assert use in (error.value.remedy or "")


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_keys(text: str) -> translate.Launch:
        monkeypatch.setenv("FOREDRAFT_API_KEYS", text)
        return translate.launch("my/model", None, {}, ScaleOptions(), {"FOREDRAFT_API_KEYS": text})

    found = with_keys(f"alice={KEY}")
    assert found.secrets == {"VLLM_API_KEY": KEY}
    assert KEY not in " ".join(found.arguments)
    assert "/metrics" in found.notes[0]
    assert with_keys(KEY).secrets == {"VLLM_API_KEY": KEY}
    assert with_keys("").secrets == {}
    with pytest.raises(ConfigError, match="one key here"):
        with_keys(f"alice={KEY},bob={KEY}2")
    with pytest.raises(ConfigError, match="at least 16"):
        with_keys("short")


def test_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    found = find_model(str(tmp_path), "target")
    assert (found.name, found.config) == (str(tmp_path.resolve()), {"vocab_size": 5})
    assert launch().name == "my/model"
    assert translate.launch(str(tmp_path), None, {}, ScaleOptions(), {}).name == tmp_path.name
    (tmp_path / "config.json").write_text("[]")
    for spec in (str(tmp_path), "x.gguf", "smollm2-135m", "../no/where", "plain"):
        with pytest.raises(ConfigError) as error:
            find_model(spec, "target")
        assert error.value.field == "target"
        assert error.value.remedy


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--target", "a/b", "--guard"], "--guard: vLLM cannot stop drafting"),
        (["--target", "a/b", "--k", "auto"], "--k: vLLM has no automatic draft length"),
        (["--target", "a/b", "--k", "-1"], "--k"),
        (["--target", "a/b", "--tensor-parallel", "0"], "--tensor-parallel"),
        (["--target", "a/b", "--stream-smoothing", "8"], "--stream-smoothing: vLLM sends what each step wrote"),
        (["--target", "a/b", "--tls-key", "k"], "--tls-certificate: TLS needs both"),
        (["--drafter", "lookup"], "--target: vLLM does not read smollm2-135m"),
        (["--target", "a/b", "--vllm-python", "no/python"], "--vllm-python: no/python is no program"),
    ],
)
def test_complaints_name_the_option(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    outcome = Cli(capsys)("serve", "--engine", "vllm", "--dry-run", *argv)
    assert outcome.code == 2
    assert outcome.error_line.startswith(expected)
    assert outcome.out == ""


def test_one_drafter_only(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--target", "a/b", "--drafter", "lookup", "--drafter", "suffix", "--dry-run"]
    outcome = Cli(capsys)("serve", "--engine", "vllm", *argv)
    assert (outcome.code, outcome.error_line) == (2, "--drafter: vLLM drafts with one for all requests; give it once")


def test_options_of_vllm_need_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Cli(capsys)("serve", "--dry-run")
    assert (outcome.code, outcome.error_line) == (2, "--dry-run: is for vLLM only; add --engine vllm, or drop it")
