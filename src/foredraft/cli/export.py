"""``foredraft export``: a drafter for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.console import print_plain


def export(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="An EAGLE-3 checkpoint in either layout.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write.")],
    verifier: Annotated[
        str, typer.Option("--verifier", metavar="NAME", help="Hub id or folder of the model that it drafts for.")
    ],
    architecture: Annotated[
        str, typer.Option("--architecture", metavar="CLASS", help="Class name in the model's config.json.")
    ] = "LlamaForCausalLM",
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, max=128, help="Draft length to recommend.")] = 5,
) -> None:
    """Write an EAGLE-3 head as the speculators format has it, which vLLM loads."""
    from foredraft.export.speculators import Verifier, export_head

    shape = export_head(source, out, Verifier(verifier, architecture), speculative_tokens=k)
    print_plain(f"{out}: EAGLE-3, {shape.draft_vocab} of {shape.vocab} tokens, taps {', '.join(map(str, shape.taps))}")
