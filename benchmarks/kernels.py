"""What a pass over packed weights costs at 1 … 16 rows, beside torch's own products at the same moment.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json && python benchmarks/figures.py

Eight matrices of 8960 x 1536 (110 million weights) stand for the layers of a model: together they fit into no cache.
Every number is the minimum and the median of interleaved repeats (ours, torch's, ours, …). Between them bandwidth is
measured by summing 256 MiB, and what the processor's multipliers give by a loop over registers. On a machine that
others use the minimum is the better guide, and two threads may measure nothing but waiting; ``--clock cpu --threads 1``
counts processor time instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.kernels import PackedLinear, isa_name, library, why_unavailable
from foredraft.kernels.formats import GGUF
from foredraft.machine import provenance

OUT, IN, COUNT = 8960, 1536, 8
ROWS = (1, 2, 4, 8, 16)
Run = Callable[[Tensor], object]


def random_blocks(kind: str) -> Tensor:
    """Random bytes whose scales are small numbers: high bytes below 0x30 are halves under 0.2."""
    size = OUT * IN // GGUF[kind].block * GGUF[kind].block_bytes
    return torch.randint(0, 48, (size,), dtype=torch.uint8)


def ours(name: str) -> tuple[list[Run], int]:
    """Eight linears of format ``name`` ("Q4_0:int8" = format and activations), and the bytes of their weights."""
    kind, _, activations = name.partition(":")
    if kind in ("float32", "bfloat16"):
        weight = torch.randn(OUT, IN)
        linears = [PackedLinear.from_float(weight, None, kind) for _ in range(COUNT)]
    else:
        raw, how = random_blocks(kind), activations or "float32"
        linears = [PackedLinear.from_gguf_blocks(raw, kind, (OUT, IN), None, how) for _ in range(COUNT)]
    return list(linears), sum(linear.bytes for linear in linears)


def torchs(name: str) -> list[Run]:
    """torch's own product of about the same number of bits, or nothing where it has none."""
    kind = name.partition(":")[0]
    if kind in ("float32", "bfloat16"):
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        dense = [torch.randn(OUT, IN).to(dtype) for _ in range(COUNT)]
        return [lambda x, w=w: functional.linear(x.to(dtype), w) for w in dense]
    if kind == "Q8_0":
        wide = [torch.randint(-127, 127, (OUT, IN), dtype=torch.int8) for _ in range(COUNT)]
        scales = torch.rand(OUT, dtype=torch.bfloat16)
        return [lambda x, w=w: torch._weight_int8pack_mm(x.bfloat16(), w, scales) for w in wide]
    if kind == "Q4_0":
        small = torch.randint(0, 16, (OUT, IN), dtype=torch.int32)
        packed = [torch._convert_weight_to_int4pack_for_cpu(small, 1) for _ in range(COUNT)]
        pairs = torch.rand(IN // 32, OUT, 2).bfloat16()
        return [lambda x, w=w: torch._weight_int4pack_mm_for_cpu(x.bfloat16(), w, 32, pairs) for w in packed]
    return []


def once(runs: list[Run], x: Tensor, clock: Callable[[], float]) -> float:
    start = clock()
    for run in runs:
        run(x)
    return (clock() - start) * 1e3


def bandwidth(clock: Callable[[], float], data: Tensor) -> float:
    """GB/s of one read."""
    start = clock()
    data.sum()
    return data.numel() * 8 / (clock() - start) / 1e9


def multipliers(threads: int, clock: Callable[[], float]) -> float:
    """Byte products a second that all threads together add up in registers; 0.0 where nobody wrote that loop."""
    compiled, isa, rounds = library.library(), library.isa(), 5_000_000
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = clock()
            done = sum(pool.map(lambda _: compiled.fd_ceiling(isa, rounds), range(threads)))
            best = max(best, done / (clock() - start))
    return best


def measure(name: str, repeats: int, clock: Callable[[], float], data: Tensor) -> dict[str, object]:
    mine, size = ours(name)
    theirs = torchs(name)
    cells, speeds = [], []
    for rows in ROWS:
        x = torch.randn(rows, IN)
        a, b = [], []
        once(mine, x, clock)
        for _ in range(repeats):
            a.append(once(mine, x, clock))
            if theirs:
                b.append(once(theirs, x, clock))
        speeds.append(bandwidth(clock, data))
        cell: dict[str, object] = {"rows": rows, "ms_min": min(a), "ms_median": statistics.median(a)}
        if b:
            cell |= {"torch_ms_min": min(b), "torch_ms_median": statistics.median(b)}
        cells.append(cell)
    best = [float(str(cell["ms_min"])) for cell in cells]
    return {
        "format": name,
        "bytes": size,
        "bandwidth_gb_s": max(speeds),
        "share_of_bandwidth": size / best[0] / 1e6 / max(speeds),
        "cost8_over_cost1": best[ROWS.index(8)] / best[0],
        "passes": cells,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    names = "float32 bfloat16 Q8_0 Q8_0:int16 Q4_0 Q4_0:int16 Q4_0:int8 Q4_1:int8 Q4_K:int8 Q6_K:int16"
    parser.add_argument("--formats", nargs="*", default=names.split())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    data = torch.ones(2**25, dtype=torch.int64)
    print(f"kernels: {isa_name()} {why_unavailable()}, {options.threads} thread(s), {options.clock} ms: ours | torch")
    results, most = [], 0.0
    for name in options.formats:
        most = max(most, multipliers(options.threads, clock))
        result = measure(name, options.repeats, clock, data)
        results.append(result)
        cells = [
            f"{c['ms_min']:6.1f} | {c['torch_ms_min']:6.1f}" if "torch_ms_min" in c else f"{c['ms_min']:6.1f} |      –"
            for c in result["passes"]  # type: ignore[attr-defined]
        ]
        print(
            f"{name:11s} {'   '.join(cells)}   share {result['share_of_bandwidth']:.2f} of "
            f"{result['bandwidth_gb_s']:.1f} GB/s   8/1 {result['cost8_over_cost1']:.2f}",
            flush=True,
        )
    print(f"multipliers: {most / 1e9:.0f} G byte products a second")
    if options.out:
        report = {
            "provenance": provenance(),
            "isa": isa_name(),
            "threads": options.threads,
            "clock": options.clock,
            "byte_products_per_s": most,
            "weights": COUNT * OUT * IN,
            "results": results,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
