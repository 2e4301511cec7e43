"""What the linters of EAGLE checkpoints share: findings, texts of the target, and acceptance on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.config import SamplingParams
from foredraft.drafters.eagle1_checkpoint import embedding_of
from foredraft.engine.engine import Engine
from foredraft.models.info import LoadedModel
from foredraft.train.eagle_net import EagleNet
from foredraft.train.record import Recorder

PROMPTS = (
    "Explain in three sentences how a bicycle stays upright.",
    "Write a Python function that returns the sum of the digits of a number.",
    "Summarise: The library opens at nine. It closes at six, and on Sundays it does not open at all.",
    "Write a short letter that thanks a teacher.",
)
CHAIN, TOKENS = 3, 48
CLEARLY, USEFUL = 1.3, 1.15
"""A variant must accept this many times as often, and give as many tokens a pass, before it is called the right one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``error``) or that deserves a look (``warning``)."""

    level: str
    problem: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found.

    Attributes:
        alpha: Greedy acceptance by position, each where those before it were accepted; empty if the head does not run.
        tau: Tokens a target pass with chains of :data:`CHAIN`; 1 if the head does not run.
    """

    findings: list[Finding]
    alpha: list[float]
    tau: float

    @property
    def broken(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"{f.level}: {f.problem}" + (f"; {f.remedy}" if f.remedy else "") for f in self.findings]
        if self.alpha:
            alpha = ", ".join(f"{value:.2f}" for value in self.alpha)
            found.append(f"acceptance by position {alpha}; {self.tau:.2f} tokens a target pass with chains of {CHAIN}")
        return found or ["nothing to complain about"]


def size_findings(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, ...]], remedy: Callable[[str, tuple[int, ...]], str]
) -> list[Finding]:
    """Weights that are missing, of another size, or not finite; ``remedy(name, size)`` for one of another size."""
    found = []
    for name, size in sizes.items():
        if name not in tensors:
            found.append(Finding("error", f"{name} is missing", "export the head again"))
        elif tuple(tensors[name].shape) != size:
            problem = f"{name} is {list(tensors[name].shape)}, not {list(size)}"
            found.append(Finding("error", problem, remedy(name, tuple(tensors[name].shape))))
        elif not bool(torch.isfinite(tensors[name].float()).all()):
            found.append(Finding("error", f"{name} holds NaN or infinity", "train again with a lower rate"))
    return found


def embedding_findings(tensors: Mapping[str, Tensor], loaded: LoadedModel) -> list[Finding]:
    """Whether a checkpoint's own embedding is the target's."""
    own = tensors.get("embed_tokens.weight")
    embed: Callable[[Tensor], Tensor] | None = getattr(loaded.target, "embed", None)
    if own is None or embed is None:
        return []
    rows = torch.arange(0, own.shape[0], max(own.shape[0] // 256, 1))
    theirs = embed(rows).float()
    if theirs.shape[1] != own.shape[1]:
        return []
    alike = float(functional.cosine_similarity(own[rows].float(), theirs).mean())
    if alike < 0.5:
        problem = f"embed_tokens is not the target's embedding (cosine {alike:.2f}); it looks random"
        return [Finding("error", problem, "remove it from the file, so that the target's is used")]
    return []


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote: ids, length of the prompt, and every layer's hidden states ``[n - 1, layers + 1, d]``."""

    ids: list[int]
    prompt_length: int
    states: Tensor


def texts_of(loaded: LoadedModel, highest: int) -> list[Text]:
    """What the target writes after :data:`PROMPTS`; ``highest`` is its last layer if it does not say."""
    layers = getattr(getattr(loaded.target, "shape", None), "layers", highest)
    recorder = Recorder(range(layers + 1))
    engine = Engine(loaded, recorder, k=0, prefix_reuse=False)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        prompts = [[1 + i] * 4 for i in range(len(PROMPTS))]
    elif tokenizer.has_chat_template:
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    else:
        prompts = [tokenizer.encode(text) for text in PROMPTS]
    found = []
    for prompt in prompts:
        request = engine.submit(prompt, SamplingParams(max_tokens=TOKENS))
        while not request.finished:
            engine.step()
        if request.error is not None:
            raise request.error
        states = recorder.take(request).float().cpu()
        if len(request.ids) - request.prompt_length > CHAIN + 1:
            found.append(Text(list(request.ids), request.prompt_length, states))
    return found


@torch.no_grad()
def acceptance(
    net: EagleNet, ids: Tensor, tensors: Mapping[str, Tensor], loaded: LoadedModel, texts: list[Text]
) -> tuple[list[float], float]:
    """Greedy acceptance by position and tokens a pass, drafting :data:`CHAIN` tokens from every position.

    Args:
        net: The head.
        ids: ``[D]`` the target's id of each of its tokens.
        tensors: The checkpoint, whose embedding is used if it has one.
    """
    embed = embedding_of(tensors, loaded.target)
    index = torch.full((net.shape.vocab,), -1)
    index[ids] = torch.arange(len(ids))
    tried, accepted, starts = torch.zeros(CHAIN), torch.zeros(CHAIN), 0
    for text in texts:
        tokens = torch.tensor(text.ids)
        length, first = len(tokens) - 2, max(text.prompt_length - 1, 0)
        after = tokens[1 : length + 1]
        logits = net(text.states[:length, list(net.shape.taps)], embed(after).float(), first, CHAIN)
        wanted = index[tokens[first + 2 :]]
        alive = torch.ones(len(wanted) - CHAIN + 1, dtype=torch.bool)
        starts += len(alive)
        for j, row in enumerate(logits):
            tried[j] += alive.sum()
            alive = alive & (row.argmax(-1) == wanted[j:])[: len(alive)]
            accepted[j] += alive.sum()
    return (accepted / tried.clamp(min=1)).tolist(), 1 + float(accepted.sum()) / max(starts, 1)


def clearly_better(tau: float, than: float) -> bool:
    """Whether a variant of a head with ``tau`` tokens a pass is the right one."""
    return tau > USEFUL and tau - 1 > CLEARLY * (than - 1)


def useless(tau: float) -> list[Finding]:
    """A warning if the head gives no more than ``tau`` near 1."""
    if tau >= 1.1:
        return []
    problem = f"only {tau:.2f} tokens a target pass: the head foresees next to nothing of what this target writes"
    return [Finding("warning", problem, "check that it was trained for this target, and long enough")]


def with_halves(tensors: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """The weights with rotary rows of interleaved pairs turned into two halves a head."""
    turned = dict(tensors)
    for part, count in (("q", heads), ("k", kv_heads)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        turned[name] = halves(tensors[name], count)
    return turned


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of interleaved pairs as two halves a head."""
    dim = weight.shape[0] // heads
    return weight.view(heads, dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
