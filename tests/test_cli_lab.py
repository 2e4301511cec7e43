"""``foredraft lab``: the studies from the command line, in their toy sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Cli

STUDIES = ("article", "t5", "moe", "load")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.mark.parametrize("name", ["moe", "load"])
def test_a_study_writes_its_files_and_prints_them(cli: Cli, name: str, tmp_path: Path) -> None:
    done = cli("lab", name, "--quick", "--out", str(tmp_path), "--seed", "4")
    assert done.out.splitlines()[-2:] == [
        f"page     {tmp_path / name}.html",
        f"figures  {tmp_path / name}.json",
    ]
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert (found["seed"], found["quick"]) == (4, True)
    assert (tmp_path / f"{name}.html").read_text().count("<svg") >= 1
    assert list(tmp_path.glob("*.png"))


def test_json_is_the_saved_result_and_where_the_page_is(cli: Cli, tmp_path: Path) -> None:
    printed = cli("lab", "load", "--quick", "--json", "--out", str(tmp_path)).json
    assert printed.pop("html") == str(tmp_path / "load.html")
    assert printed == json.loads((tmp_path / "load.json").read_text())


@pytest.mark.parametrize("name", STUDIES)
def test_bad_options_are_refused_before_the_work(cli: Cli, name: str, tmp_path: Path) -> None:
    refused = cli("lab", name, "--seed", "-1")
    assert (refused.code, refused.out) == (2, "")
    assert "must be 0 or more (got -1)" in refused.err
    (tmp_path / "file").write_text("in the way")
    refused = cli("lab", name, "--out", str(tmp_path / "file"))
    assert (refused.code, refused.out) == (2, "")
    assert "is a file; name a folder" in refused.err
