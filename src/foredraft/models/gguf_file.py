"""Reading GGUF files: header, metadata and tensors, without trusting a single length in them.

The format is specified in ggml's docs/gguf.md. The header is parsed here rather than by ``gguf.GGUFReader``, which
takes seconds for a vocabulary of 100,000 tokens; block layouts come from the ``gguf`` package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from foredraft.errors import ModelLoadError
from foredraft.models.gguf_blocks import dequantise
from foredraft.models.weights import Quantised, Weight

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``offset`` and ``nbytes`` in the file, ``kind`` GGML's name of its format, ``shape``
    with output rows first.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """A memory-mapped GGUF file; a :class:`~foredraft.models.weights.TensorSource`.

    Attributes:
        path: The file.
        metadata: Every key, arrays as lists.
        tensors: Every tensor by name.

    Raises:
        ModelLoadError: The file is missing, is no GGUF, is cut short or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private, writable mapping: torch wants writable memory, and writes would never reach the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot be read ({error})", field=str(path), remedy="check the path") from None
        try:
            self.metadata, self.tensors = _Header(self._map).parse()
        except _BadHeaderError as error:
            raise self._broken(str(error)) from None
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError):
            raise self._broken("its header is cut short or damaged") from None
        self._orders: dict[str, Tensor] = {}
        if self.metadata.get("general.architecture") == "llama":
            self._orders = self._rotary_orders()

    def _broken(self, problem: str) -> ModelLoadError:
        return ModelLoadError(problem, field=str(self.path), remedy="download it again and compare its checksum")

    def _rotary_orders(self) -> dict[str, Tensor]:
        """llama.cpp interleaves the two halves of each rotated head in files of its ``llama`` architecture; these
        row orders undo that.
        """
        heads = self.metadata.get("llama.attention.head_count")
        kv_heads = self.metadata.get("llama.attention.head_count_kv", heads)
        orders = {}
        for name, count in (("attn_q", heads), ("attn_k", kv_heads)):
            entry = self.tensors.get(f"blk.0.{name}.weight")
            if entry is None or not isinstance(count, int) or count < 1 or entry.shape[0] % (2 * count):
                continue  # the shape check of the loader names the fault
            orders[name] = torch.arange(entry.shape[0]).view(count, -1, 2).transpose(1, 2).reshape(-1)
        return orders

    def find(self, name: str) -> Weight | None:
        expert: int | None = None
        stem, _, last = name.rpartition(".")
        if name not in self.tensors and last.isdigit() and stem.endswith("_exps"):
            name, expert = f"{stem}.weight", int(last)
        entry = self.tensors.get(name)
        if entry is None or (expert is not None and (len(entry.shape) != 3 or expert >= entry.shape[0])):
            return None
        if expert is not None:
            size = entry.nbytes // entry.shape[0]
            entry = replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * size, nbytes=size)
        if name.endswith("ffn_gate_inp_shexp.weight") and len(entry.shape) == 1:  # its one row is stored flat
            entry = replace(entry, shape=(1, *entry.shape))
        read_quantised: Callable[[], Quantised] | None = None
        if entry.kind not in _PLAIN:

            def read_quantised() -> Quantised:
                return Quantised(entry.kind, self._bytes(entry).view(entry.shape[0], -1))

        order = self._orders.get(name.split(".")[2]) if name.startswith("blk.") and expert is None else None
        return Weight(name, entry.shape, lambda: self._read(entry), read_quantised, order)

    def _bytes(self, entry: TensorEntry) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)

    def _read(self, entry: TensorEntry) -> Tensor:
        stored = self._bytes(entry)
        if entry.kind in _PLAIN:
            return stored.view(_PLAIN[entry.kind]).view(entry.shape)
        try:
            return dequantise(entry.kind, stored.view(-1, stored.numel() * entry.shape[-1] // prod(entry.shape))).view(
                entry.shape
            )
        except NotImplementedError:
            raise ModelLoadError(
                f"its format {entry.kind} cannot be read", field=str(self.path), remedy="use a Q4_K_M, Q8_0 or F16 file"
            ) from None


class _BadHeaderError(Exception):
    """A contradiction in the header, in words for the user."""


class _Header:
    """A cursor over the header. Every read is bounds-checked by ``struct`` or by :meth:`_take`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        if self._take(4) != b"GGUF":
            raise _BadHeaderError("it is not a GGUF file (the magic bytes are missing)")
        version = self._scalar("I")
        if version not in (2, 3):
            raise _BadHeaderError(f"GGUF version {version} is not supported (or its byte order is big-endian)")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        raw = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _BadHeaderError(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        return metadata, {name: self._entry(name, shape, kind, base + at) for name, shape, kind, at in raw}

    def _entry(self, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(kind_id)
        except ValueError:
            raise _BadHeaderError(f"tensor {name!r} has the unknown format number {kind_id}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise _BadHeaderError(f"tensor {name!r} has rows of {shape[-1:]} numbers, not whole blocks of {block}")
        nbytes = prod(shape) // block * size
        if offset + nbytes > len(self._data):
            raise _BadHeaderError(
                f"tensor {name!r} ends at byte {offset + nbytes:,} but the file has only {len(self._data):,}"
            )
        return TensorEntry(kind.name, shape, offset, nbytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        return name, tuple(reversed(shape)), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        if item == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        code = self._code(item)
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _BadHeaderError(f"metadata has the unknown type number {kind}")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _BadHeaderError(f"its header is cut short at byte {len(self._data):,}")
        start = self._at
        self._at += count
        return self._data[start : self._at]
