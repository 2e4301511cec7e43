"""A linter for EAGLE-3 checkpoints: what is wrong with the files, and what the acceptance says.

Many mistakes leave a head that loads and runs and is merely useless. So the head also drafts from what its target
writes, as it is and with one convention changed at a time; a change that helps names the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.config import SamplingParams
from foredraft.drafters import eagle_checkpoint as checkpoints
from foredraft.drafters.eagle_head import HeadShape
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError
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


def check_head(path: Path, loaded: LoadedModel) -> Report:
    """Checks the files in ``path`` and drafts a little with them for ``loaded``."""
    try:
        checkpoint = checkpoints.read_checkpoint(path)
        shape = checkpoints.head_shape(checkpoint, loaded.target)
        ids = checkpoints.token_ids(checkpoint, shape)
        checkpoints.check_target(shape, loaded.target)
    except ForedraftError as error:
        return Report([Finding("error", str(error))], [], 1.0)
    findings = [
        *_sizes(checkpoint.tensors, shape),
        *_map(checkpoint.tensors, shape, ids),
        *_switches(checkpoint),
        *_embedding(checkpoint.tensors, loaded),
    ]
    if any(finding.level == "error" for finding in findings):
        return Report(findings, [], 1.0)
    texts = _texts(loaded, shape)
    alpha, tau = acceptance(shape, checkpoint.tensors, ids, loaded, texts)
    findings += _variants(shape, checkpoint.tensors, ids, loaded, texts, tau)
    if tau < 1.1:
        problem = f"only {tau:.2f} tokens a target pass: the head foresees next to nothing of what this target writes"
        findings.append(Finding("warning", problem, "check that it was trained for this target, and long enough"))
    return Report(findings, alpha, tau)


# --- the files


def _sizes(tensors: Mapping[str, Tensor], shape: HeadShape) -> list[Finding]:
    found = []
    for name, size in checkpoints.expected_sizes(shape).items():
        if name not in tensors:
            found.append(Finding("error", f"{name} is missing", "export the head again"))
        elif tuple(tensors[name].shape) != size:
            remedy = "compare config.json with the weights"
            if name == "fc.weight" and tensors[name].shape[1] % shape.target_hidden == 0:
                wanted = tensors[name].shape[1] // shape.target_hidden
                remedy = f"fc reads {wanted} tapped layers, config.json names {len(shape.taps)}: {list(shape.taps)}"
            found.append(Finding("error", f"{name} is {list(tensors[name].shape)}, not {list(size)}", remedy))
        elif not bool(torch.isfinite(tensors[name].float()).all()):
            found.append(Finding("error", f"{name} holds NaN or infinity", "train again with a lower rate"))
    return found


def _map(tensors: Mapping[str, Tensor], shape: HeadShape, ids: Tensor) -> list[Finding]:
    known = tensors.get("t2d")
    if known is None:
        return [] if shape.draft_vocab == shape.vocab else [Finding("warning", "t2d is missing; vLLM wants it")]
    if known.numel() != shape.vocab or sorted(known.nonzero().flatten().tolist()) != sorted(ids.tolist()):
        return [Finding("error", "t2d and d2t name different tokens", "write t2d again from d2t")]
    return []


def _switches(checkpoint: checkpoints.Checkpoint) -> list[Finding]:
    found = []
    if checkpoint.speculators and "norm_before_residual" not in checkpoint.config:
        problem = "norm_before_residual is not in config.json: vLLM then takes true, speculators false"
        found.append(Finding("warning", problem, "write down the value that it was trained with"))
    named = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
    named = named or (checkpoint.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not named:
        problem = (
            "eagle_aux_hidden_state_layer_ids is not in config.json: readers guess 2, half of the layers, all but 3"
        )
        found.append(Finding("warning", problem, "write down the layers that it was trained on"))
    return found


def _embedding(tensors: Mapping[str, Tensor], loaded: LoadedModel) -> list[Finding]:
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


# --- acceptance


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote: ids, length of the prompt, and every layer's hidden states ``[n - 1, layers + 1, d]``."""

    ids: list[int]
    prompt_length: int
    states: Tensor


def _texts(loaded: LoadedModel, shape: HeadShape) -> list[Text]:
    layers = getattr(getattr(loaded.target, "shape", None), "layers", max(shape.taps))
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
        states = recorder.take(request).float()
        if len(request.ids) - request.prompt_length > CHAIN + 1:
            found.append(Text(list(request.ids), request.prompt_length, states))
    return found


@torch.no_grad()
def acceptance(
    shape: HeadShape, tensors: Mapping[str, Tensor], ids: Tensor, loaded: LoadedModel, texts: list[Text]
) -> tuple[list[float], float]:
    """Greedy acceptance by position and tokens a pass, drafting :data:`CHAIN` tokens from every position."""
    net = EagleNet(shape)
    for name in net.names:
        net.set(name, tensors[name].float())
    own = tensors.get("embed_tokens.weight")
    index = torch.full((shape.vocab,), -1)
    index[ids] = torch.arange(len(ids))
    tried, accepted, starts = torch.zeros(CHAIN), torch.zeros(CHAIN), 0
    for text in texts:
        tokens = torch.tensor(text.ids)
        length, first = len(tokens) - 2, max(text.prompt_length - 1, 0)
        after = tokens[1 : length + 1]
        embed: Callable[[Tensor], Tensor] = loaded.target.embed if own is None else own.float().__getitem__  # type: ignore[attr-defined]
        logits = net(text.states[:length, list(shape.taps)], embed(after).float(), first, CHAIN)
        wanted = index[tokens[first + 2 :]]
        alive = torch.ones(len(wanted) - CHAIN + 1, dtype=torch.bool)
        starts += len(alive)
        for j, row in enumerate(logits):
            tried[j] += alive.sum()
            alive = alive & (row.argmax(-1) == wanted[j:])[: len(alive)]
            accepted[j] += alive.sum()
    return (accepted / tried.clamp(min=1)).tolist(), 1 + float(accepted.sum()) / max(starts, 1)


def _variants(
    shape: HeadShape, tensors: Mapping[str, Tensor], ids: Tensor, loaded: LoadedModel, texts: list[Text], tau: float
) -> list[Finding]:
    """Tries each convention the other way round."""
    layers = texts[0].states.shape[1] - 1 if texts else 0
    tried: list[tuple[str, str, HeadShape, Mapping[str, Tensor]]] = []
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in shape.taps)
        if taps and min(taps) >= 0 and max(taps) <= layers:
            problem = f"tapped layers {list(taps)} serve it better than {list(shape.taps)}"
            tried.append(
                (problem, "conventions differ by one: correct the layer ids", replace(shape, taps=taps), tensors)
            )
    problem = f"norm_before_residual={not shape.norm_before_residual} serves it better"
    other = replace(shape, norm_before_residual=not shape.norm_before_residual)
    tried.append((problem, "correct it in config.json", other, tensors))
    turned = dict(tensors)
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        turned[name] = _halves(tensors[name], heads)
    problem = "q_proj and k_proj have the interleaved rotary layout"
    tried.append((problem, "reorder their rows into two halves a head", shape, turned))
    found = []
    for problem, remedy, changed, weights in tried:
        better = acceptance(changed, weights, ids, loaded, texts)[1]
        if better > USEFUL and better - 1 > CLEARLY * (tau - 1):
            found.append(Finding("error", f"{problem} ({better:.2f} against {tau:.2f} tokens a pass)", remedy))
    return found


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of interleaved pairs as two halves a head."""
    dim = weight.shape[0] // heads
    return weight.view(heads, dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
