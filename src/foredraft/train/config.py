"""What a training run is made with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foredraft.config import Schema
from foredraft.errors import ConfigError


class LoopOptions(Schema):
    """What every run is made with, whatever it trains."""

    steps: Annotated[int, Field(ge=1)] = 2000
    """Optimiser steps."""
    batch: Annotated[int, Field(ge=1)] = 4
    """Texts a step, of all processes together; their gradients are accumulated one text at a time."""
    lr: Annotated[float, Field(gt=0, le=1)] = 5e-4
    """Peak learning rate of AdamW; it rises over the first steps and falls along a cosine."""
    warmup: Annotated[int, Field(ge=0)] = 20
    """Steps over which the learning rate rises."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled weight decay."""
    clip: Annotated[float, Field(gt=0)] = 0.5
    """Largest norm of the gradient."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number type of training's products; bfloat16 is for accelerators and for CPUs with instructions for it."""
    held_out: Annotated[int, Field(ge=1)] = 24
    """Texts that are kept back to measure acceptance."""
    measure_every: Annotated[int, Field(ge=1)] = 100
    """Steps between measurements on held-out texts."""
    save_every: Annotated[int, Field(ge=1)] = 50
    """Steps between checkpoints."""
    patience: Annotated[int, Field(ge=1)] = 8
    """Measurements without a better one after which training stops early."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, of the order of the texts, and of everything that is drawn."""


class EagleTraining(LoopOptions):
    """Options of ``foredraft train eagle3``."""

    rollout: Annotated[int, Field(ge=1, le=8)] = 3
    """Drafted tokens a position in training (training-time test); it grows to this over the run, but from a trained
    head on it is this from the first step."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of each drafted token's loss relative to the one before it."""
    draft_vocab: Annotated[int, Field(ge=2)] = 8192
    """Tokens that the head can propose: the most frequent ones of the data."""
    candidates: Annotated[int, Field(ge=2)] = 2048
    """Tokens of the draft vocabulary that the loss of a text is computed over."""
    train_lm_head: bool = False
    """Train the LM head, too, instead of keeping the target's rows; pays with millions of tokens."""
    round_weights: bool = False
    """Train with weights rounded to four bits, as drafting rounds them: a last stage that wins back what that costs."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Attention heads, also for keys and values; without it as many as the target has."""
    intermediate: Annotated[int, Field(ge=1)] | None = None
    """Inner width of the MLP; without it the target's."""


class Eagle1Training(LoopOptions):
    """Options of ``foredraft train eagle1``."""

    noise: Annotated[float, Field(ge=0)] = 0.1
    """Half width of the uniform noise that is added to the target's features."""
    token_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the cross-entropy beside the smooth L1 distance of the features."""
    candidates: Annotated[int, Field(ge=2)] = 2048
    """Tokens that the cross-entropy of a text is computed over."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Attention heads, also for keys and values; without it as many as the target has."""
    intermediate: Annotated[int, Field(ge=1)] | None = None
    """Inner width of the MLP; without it the target's."""


class DraftTraining(LoopOptions):
    """Options of ``foredraft train draft``."""

    loss: Literal["kl", "reverse-kl", "tv", "sequence"] = "kl"
    """What is made small: KL(p, q), KL(q, p), the total variation distance, or the cross-entropy of the answers' tokens
    (sequence-level distillation)."""
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the texts whose answers the student writes itself, for the target to score."""
    first_layers: Annotated[int, Field(ge=1)] | None = None
    """Start from so many of the target's first layers; without it from a new model of the sizes below."""
    layers: Annotated[int, Field(ge=1)] = 2
    """Layers of a new model."""
    hidden: Annotated[int, Field(ge=8)] = 256
    """Width of a new model."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads of a new model."""
    intermediate: Annotated[int, Field(ge=1)] | None = None
    """Inner width of a new model's MLPs; without it three times its width."""

    @model_validator(mode="after")
    def _fits(self) -> DraftTraining:
        if self.on_policy and self.loss == "sequence":
            raise ConfigError(
                "needs the target's own answers", field="loss", remedy="use kl, reverse-kl or tv with on_policy"
            )
        both = sorted({"layers", "hidden", "heads", "intermediate"} & self.model_fields_set)
        if self.first_layers is not None and both:
            raise ConfigError(
                "the target's first layers have its sizes", field=both[0], remedy="drop it, or first_layers"
            )
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ConfigError(
                f"must be an even multiple of heads (got {self.hidden} for {self.heads})",
                field="hidden",
                remedy="choose another number of heads",
            )
        return self
