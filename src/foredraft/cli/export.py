"""``foredraft export``: a drafter, or a model, for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from foredraft.cli.console import print_plain
from foredraft.cli.session import spinner
from foredraft.errors import ConfigError


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of an EAGLE-3 checkpoint in either layout; or a GGUF file or catalogue name of a model.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write.")],
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", metavar="NAME", help="Head: hub id or folder of the model that it drafts for."),
    ] = None,
    architecture: Annotated[
        str, typer.Option("--architecture", metavar="CLASS", help="Head: class name in the model's config.json.")
    ] = "LlamaForCausalLM",
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, max=128, help="Head: draft length to recommend.")] = 5,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="Model: number type of the weights.")
    ] = "bfloat16",
) -> None:
    """Write an EAGLE-3 head as the speculators format has it, or a GGUF model as safetensors; vLLM loads both."""
    from foredraft.models.catalog import find

    if find(source) is not None or source.endswith(".gguf"):
        _model(source, out, verifier, dtype)
        return
    if verifier is None:
        raise ConfigError(
            "a head must name the model that it drafts for", field="verifier", remedy="give --verifier NAME"
        )
    from foredraft.export.speculators import Verifier, export_head

    shape = export_head(Path(source), out, Verifier(verifier, architecture), speculative_tokens=k)
    print_plain(f"{out}: EAGLE-3, {shape.draft_vocab} of {shape.vocab} tokens, taps {', '.join(map(str, shape.taps))}")


def _model(source: str, out: Path, verifier: str | None, dtype: Literal["bfloat16", "float32"]) -> None:
    if verifier is not None:
        raise ConfigError("is for heads only", field="verifier", remedy="drop it")
    from foredraft.export.dense import write_dense
    from foredraft.models.locate import locate

    with spinner(f"dequantising {source} …"):
        write_dense(locate(source), out, dtype)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print_plain(f"{out}: {dtype} weights, {size / 1e6:.0f} MB")
