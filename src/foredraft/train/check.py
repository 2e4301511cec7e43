"""A linter for EAGLE checkpoints: what is wrong with the files, and what the acceptance says.

Many mistakes leave a head that loads and runs and is merely useless. So the head also drafts from what its target
writes, as it is and with one convention changed at a time; a change that helps names the mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from foredraft.drafters import eagle_checkpoint as checkpoints
from foredraft.drafters.eagle1_checkpoint import is_eagle1
from foredraft.drafters.eagle_head import HeadShape
from foredraft.errors import ForedraftError
from foredraft.models.info import LoadedModel
from foredraft.train.check_eagle1 import check_eagle1
from foredraft.train.check_parts import (
    Finding,
    Report,
    Text,
    acceptance,
    clearly_better,
    embedding_findings,
    size_findings,
    texts_of,
    useless,
    with_halves,
)
from foredraft.train.eagle_net import EagleNet


def check_head(path: Path, loaded: LoadedModel) -> Report:
    """Checks the files in ``path``, an EAGLE-1 or EAGLE-3 head, and drafts a little with them for ``loaded``."""
    try:
        checkpoint = checkpoints.read_checkpoint(path)
        if is_eagle1(checkpoint):
            return check_eagle1(checkpoint, loaded)
        shape = checkpoints.head_shape(checkpoint, loaded.target)
        ids = checkpoints.token_ids(checkpoint, shape)
        checkpoints.check_target(shape, loaded.target)
    except ForedraftError as error:
        return Report([Finding("error", str(error))], [], 1.0)

    def remedy(name: str, got: tuple[int, ...]) -> str:
        if name == "fc.weight" and got[1] % shape.target_hidden == 0:
            wanted = got[1] // shape.target_hidden
            return f"fc reads {wanted} tapped layers, config.json names {len(shape.taps)}: {list(shape.taps)}"
        return "compare config.json with the weights"

    findings = [
        *size_findings(checkpoint.tensors, checkpoints.expected_sizes(shape), remedy),
        *_map(checkpoint.tensors, shape, ids),
        *_switches(checkpoint),
        *embedding_findings(checkpoint.tensors, loaded),
    ]
    if any(finding.level == "error" for finding in findings):
        return Report(findings, [], 1.0)
    texts = texts_of(loaded, max(shape.taps))
    alpha, tau = _acceptance(shape, checkpoint.tensors, ids, loaded, texts)
    findings += _variants(shape, checkpoint.tensors, ids, loaded, texts, tau)
    return Report(findings + useless(tau), alpha, tau)


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


def _acceptance(
    shape: HeadShape, tensors: Mapping[str, Tensor], ids: Tensor, loaded: LoadedModel, texts: list[Text]
) -> tuple[list[float], float]:
    net = EagleNet(shape)
    for name in net.names:
        net.set(name, tensors[name].float())
    return acceptance(net, ids, tensors, loaded, texts)


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
    problem = "q_proj and k_proj have the interleaved rotary layout"
    tried.append(
        (problem, "reorder their rows into two halves a head", shape, with_halves(tensors, shape.heads, shape.kv_heads))
    )
    found = []
    for problem, remedy, changed, weights in tried:
        better = _acceptance(changed, weights, ids, loaded, texts)[1]
        if clearly_better(better, tau):
            found.append(Finding("error", f"{problem} ({better:.2f} against {tau:.2f} tokens a pass)", remedy))
    return found
