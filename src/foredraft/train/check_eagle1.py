"""The linter's part for EAGLE-1 heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.drafters.eagle1_checkpoint import eagle1_shape, eagle1_sizes
from foredraft.drafters.eagle_checkpoint import Checkpoint, check_target
from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.info import LoadedModel
from foredraft.models.norm import RMSNorm
from foredraft.train.check_parts import (
    Finding,
    Report,
    acceptance,
    clearly_better,
    embedding_findings,
    size_findings,
    texts_of,
    useless,
    with_halves,
)
from foredraft.train.eagle1_net import Eagle1Net
from foredraft.train.target_parts import TargetParts, as_decoder


def check_eagle1(checkpoint: Checkpoint, loaded: LoadedModel) -> Report:
    """Checks an EAGLE-1 checkpoint and drafts a little with it.

    Raises:
        ForedraftError: The files do not describe a head for this target at all.
    """
    layers = as_decoder(loaded.target).shape.layers
    shape = eagle1_shape(checkpoint, layers)
    check_target(shape, loaded.target)
    tensors = checkpoint.tensors
    findings = [
        *size_findings(tensors, eagle1_sizes(shape), lambda *_: "compare config.json with the weights"),
        *_bias(checkpoint),
        *embedding_findings(tensors, loaded),
    ]
    if any(finding.level == "error" for finding in findings):
        return Report(findings, [], 1.0)
    texts = texts_of(loaded, layers)
    every = torch.arange(shape.vocab)
    parts = TargetParts(loaded.target, every)
    alpha, tau = acceptance(_net(shape, tensors, parts), every, tensors, loaded, texts)
    d = shape.hidden
    swapped = {**tensors, "fc.weight": torch.cat([tensors["fc.weight"][:, d:], tensors["fc.weight"][:, :d]], 1)}
    plain = _net(shape, tensors, parts)
    plain.feature = lambda taps: taps[:, 0].float()  # type: ignore[method-assign]
    turned = with_halves(tensors, shape.heads, shape.kv_heads)
    for net, problem, remedy in (
        (_net(shape, swapped, parts), "fc reads the feature first", "swap the halves of its columns: embedding first"),
        (_net(shape, turned, parts), "q_proj and k_proj have the interleaved rotary layout", "reorder their rows"),
        (plain, "it was trained on features before the final norm", "train it on what enters the LM head"),
    ):
        better = acceptance(net, every, tensors, loaded, texts)[1]
        if clearly_better(better, tau):
            findings.append(Finding("error", f"{problem} ({better:.2f} against {tau:.2f} tokens a pass)", remedy))
    return Report(findings + useless(tau), alpha, tau)


def _bias(checkpoint: Checkpoint) -> list[Finding]:
    named, there = checkpoint.config.get("bias"), "fc.bias" in checkpoint.tensors
    if named is None:
        if there:
            return []
        return [Finding("warning", "bias is not in config.json: readers then want fc.bias", 'write "bias": false')]
    if bool(named) == there:
        return []
    problem = f"bias is {str(bool(named)).lower()} in config.json, but fc.bias is {'' if there else 'not '}in the file"
    return [Finding("error", problem, "correct config.json")]


def _net(shape: HeadShape, tensors: Mapping[str, Tensor], parts: TargetParts) -> Eagle1Net:
    final = RMSNorm(parts.decoder.final_norm.weight.cpu(), parts.decoder.final_norm.eps)
    bias = tensors.get("fc.bias")
    bias = None if bias is None else bias.float()
    net = Eagle1Net(shape, final, parts.rows.cpu(), parts.decoder.shape.logit_softcap, bias=bias)
    for name in net.names:
        net.set(name, tensors[name].float())
    return net
