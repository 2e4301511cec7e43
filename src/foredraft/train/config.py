"""What a training run is made with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from foredraft.config import Schema


class EagleTraining(Schema):
    """Options of ``foredraft train eagle3``."""

    steps: Annotated[int, Field(ge=1)] = 2000
    """Optimiser steps."""
    batch: Annotated[int, Field(ge=1)] = 4
    """Texts a step; their gradients are accumulated one text at a time."""
    lr: Annotated[float, Field(gt=0, le=1)] = 5e-4
    """Peak learning rate of AdamW; it rises over the first steps and falls along a cosine."""
    warmup: Annotated[int, Field(ge=0)] = 20
    """Steps over which the learning rate rises."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled weight decay."""
    clip: Annotated[float, Field(gt=0)] = 0.5
    """Largest norm of the gradient."""
    rollout: Annotated[int, Field(ge=1, le=8)] = 3
    """Drafted tokens a position in training (training-time test); it grows to this over the run."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of each drafted token's loss relative to the one before it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number type of training's products; bfloat16 is for accelerators and for CPUs with instructions for it."""
    draft_vocab: Annotated[int, Field(ge=2)] = 8192
    """Tokens that the head can propose: the most frequent ones of the data."""
    candidates: Annotated[int, Field(ge=2)] = 2048
    """Tokens of the draft vocabulary that the loss of a text is computed over."""
    train_lm_head: bool = False
    """Train the LM head, too, instead of keeping the target's rows; pays with millions of tokens."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Attention heads, also for keys and values; without it as many as the target has."""
    intermediate: Annotated[int, Field(ge=1)] | None = None
    """Inner width of the MLP; without it the target's."""
    held_out: Annotated[int, Field(ge=1)] = 24
    """Greedy texts that are kept back to measure acceptance."""
    measure_every: Annotated[int, Field(ge=1)] = 100
    """Steps between measurements on held-out texts."""
    save_every: Annotated[int, Field(ge=1)] = 50
    """Steps between checkpoints."""
    patience: Annotated[int, Field(ge=1)] = 8
    """Measurements without a better one after which training stops early."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the texts."""
