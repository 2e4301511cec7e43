"""Draws docs/img/steps.png: the steps of one real request, each row one pass of the target.

Run it from the root of the repository, after ``foredraft models fetch smollm2-135m``::

    python docs/steps_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters import DraftRequest, LookupDrafter
from foredraft.types import Draft, Verdict

PROMPT = """Add a docstring to each method. Write out the whole class.

```python
class Account:
    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
```"""
OUT = Path(__file__).parent / "img" / "steps.png"
STEPS = 14
COLOURS = {
    "accepted": ("#d9f0d3", "#1b7837"),
    "rejected": ("#f2f2f2", "#9e9e9e"),
    "correction": ("#fde0dd", "#b2182b"),
    "bonus": ("#d1e5f0", "#2166ac"),
    "plain": ("#ffffff", "#444444"),
}
MEANING = {
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "correction": "correction by the target",
    "bonus": "bonus token of the target",
    "plain": "nothing was drafted",
}


class Watched(LookupDrafter):
    """Prompt lookup that writes down what it proposed and what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Draft, Verdict]] = []
        self._draft = Draft()

    def propose(self, request: DraftRequest, k: int) -> Draft:
        self._draft = super().propose(request, k)
        return self._draft

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        if verdict is not None:
            self.steps.append((self._draft, verdict))
        self._draft = Draft()


def rows() -> tuple[list[list[tuple[int, str]]], Engine]:
    """Decodes the prompt; for each step, its tokens with what became of them."""
    drafter = Watched()
    engine = Engine(target="smollm2-135m", drafter=drafter, k=6, dtype="float32")
    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat([{"role": "user", "content": PROMPT}])
    engine.generate([ids], SamplingParams(max_tokens=96))
    out = []
    for draft, verdict in drafter.steps:
        row = [(token, "accepted" if i < verdict.accepted else "rejected") for i, token in enumerate(draft.tokens)]
        kind = "plain" if not draft.k else "bonus" if verdict.bonus else "correction"
        row.insert(verdict.accepted, (verdict.next_token, kind))
        out.append(row)
    return out, engine


def text(engine: Engine, token: int) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode([token], skip_special=False).replace("\n", "↵").replace(" ", "·")


def main() -> None:
    steps, engine = rows()
    first = next(i for i, row in enumerate(steps) if len(row) > 2)
    shown = steps[max(first - 2, 0) :][:STEPS]
    figure, axes = plt.subplots(figsize=(9.6, 0.34 * len(shown) + 0.9), dpi=150)
    widest = 0.0
    for line, row in enumerate(shown):
        x, y = 0.0, -line
        axes.text(-1.5, y, f"pass {max(first - 2, 0) + line + 1}", ha="right", va="center", fontsize=8, color="#666666")
        for token, kind in row:
            piece = text(engine, token)
            fill, ink = COLOURS[kind]
            width = len(piece) + 1.2
            box = Rectangle((x, y - 0.36), width, 0.72, facecolor=fill, edgecolor=ink, linewidth=0.6)
            axes.add_patch(box)
            axes.text(x + width / 2, y, piece, ha="center", va="center", fontsize=8, color=ink, family="monospace")
            if kind == "rejected":
                axes.plot([x + 0.3, x + width - 0.3], [y, y], color=ink, linewidth=0.8)
            x += width + 0.4
        widest = max(widest, x)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind][0], edgecolor=COLOURS[kind][1], label=label)
        for kind, label in MEANING.items()
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncol=5, fontsize=7.5, frameon=False)
    axes.set_xlim(-8, max(widest, 72))
    axes.set_ylim(-len(shown) + 0.4, 0.6)
    axes.axis("off")
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
