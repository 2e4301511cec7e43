"""Small heads and targets for the tests of EAGLE drafters and their trainer."""

from __future__ import annotations

import torch

from foredraft.drafters.eagle_checkpoint import build_head
from foredraft.drafters.eagle_head import EagleHead, HeadShape
from foredraft.models.rope import make_rope
from foredraft.train.eagle_net import EagleNet

VOCAB, WIDTH = 50, 16


def shape(**changes: object) -> HeadShape:
    sizes: dict[str, object] = {
        "taps": (1, 2, 3),
        "target_hidden": WIDTH,
        "hidden": WIDTH,
        "intermediate": 24,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab": VOCAB,
        "draft_vocab": 20,
        "norm_eps": 1e-5,
        "rope": make_rope({"rope_theta": 10000.0}, 8, 512),
        "max_positions": 512,
    }
    return HeadShape(**(sizes | changes))  # type: ignore[arg-type]


def ids() -> torch.Tensor:
    return torch.arange(20) * 2 + 3


def net(seed: int = 0, **changes: object) -> EagleNet:
    torch.manual_seed(seed)
    made = EagleNet(shape(**changes))
    for parameter in made.parameters():  # large enough that every part of the formula matters
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return made


def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))


def head(trained: EagleNet) -> EagleHead:
    table = embedding()
    return build_head(trained.shape, trained.state(), ids(), lambda tokens: table[tokens], bits=32)
