"""The EAGLE-3 head as something to train: training-time test over whole texts (Li 2025, arXiv 2503.01840)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.drafters.eagle_checkpoint import expected_sizes
from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.rope import RopeTable, rotate
from foredraft.train.rounding import BLOCK, rounded4


class EagleNet(nn.Module):
    """The trainable weights of a head, named as in a checkpoint.

    Hidden states have a few dimensions a hundred times larger than the others. ``fc`` is therefore trained for states
    divided by their usual size, and only its checkpoint form is for the states themselves.

    Args:
        shape: Its sizes.
        tap_scale: ``[len(taps) * target_hidden]`` usual size of each dimension of the tapped states; None is ones.
        device: Where the weights are.
        rounded: Compute with weights rounded to four bits, as drafting does (:mod:`foredraft.train.rounding`).
            Gradients are those of the weights themselves.
    """

    tap_scale: Tensor

    def __init__(
        self,
        shape: HeadShape,
        tap_scale: Tensor | None = None,
        device: torch.device | None = None,
        rounded: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.rounded = shape, rounded
        self._rounding: dict[str, tuple[int, Tensor]] = {}  # by name: version of a weight, and what rounding adds to it
        sizes = {name.removesuffix(".weight"): size for name, size in self.sizes(shape).items()}
        wide = sizes["fc"][1]
        self.register_buffer("tap_scale", torch.ones(wide) if tap_scale is None else tap_scale, persistent=False)
        self.weights = nn.ParameterDict({_key(name): nn.Parameter(_initial(size)) for name, size in sizes.items()})
        self.names = {f"{name}.weight": _key(name) for name in sizes}
        self._rope = RopeTable(shape.rope, torch.float32, device or torch.device("cpu"))
        self.to(device or torch.device("cpu"))

    @staticmethod
    def sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
        """Names and sizes of the weights of a checkpoint."""
        return expected_sizes(shape)

    def state(self) -> dict[str, Tensor]:
        """The weights under their names in a checkpoint (``fc.weight``, ``layers.0.self_attn.q_proj.weight`` …)."""
        found = {name: self.weights[key].detach() for name, key in self.names.items()}
        found |= {"fc.weight": found["fc.weight"] / self.tap_scale}
        return {name: value.cpu() for name, value in found.items()}

    def set(self, name: str, value: Tensor) -> None:
        """Sets one weight by its name in a checkpoint."""
        parameter = self.weights[self.names[name]]
        with torch.no_grad():
            parameter.copy_(value.to(parameter.device) * self.tap_scale if name == "fc.weight" else value)

    def forward(
        self, taps: Tensor, embeddings: Tensor, first: int, steps: int, wanted: Tensor | None = None
    ) -> list[Tensor]:
        """Drafts ``steps`` tokens from every position of one text, with the true tokens as its own.

        Args:
            taps: ``[T, len(taps), target_hidden]`` float32; row t belongs to position t.
            embeddings: ``[T, d]``; row t is the embedding of token t+1.
            first: First row whose output is wanted; rows before it are context only.
            wanted: ``[C]`` draft tokens whose logits are wanted; None is all ``D``.

        Returns:
            For step j = 0, 1, … logits ``[T - first - j, C]``; row i foresees token ``first + j + i + 2`` from the
            target's states up to position ``first + i``.
        """
        hidden = self.roll(self.feature(taps), embeddings, first, steps)
        return list(torch.split(self.logits(torch.cat(hidden), wanted), [len(rows) for rows in hidden]))

    def feature(self, taps: Tensor) -> Tensor:
        """``[T, len(taps), target_hidden]`` -> ``[T, d]``: what the target's states give."""
        return functional.linear(taps.flatten(1) / self.tap_scale, self._weight("fc"))

    def roll(self, feature: Tensor, embeddings: Tensor, first: int, steps: int) -> list[Tensor]:
        """The layer's outputs ``[T - first - j, d]`` of each step j, from the target's features ``[T, d]``; see
        :meth:`forward`.
        """
        shape, length = self.shape, feature.shape[0]
        cos, sin = self._rope(torch.arange(length, device=feature.device), length)
        joined, rest = self._join(embeddings, feature)
        known = [self._keys(joined, cos, sin)]
        joined, rest = joined[first:], rest[first:]
        outputs: list[Tensor] = []
        for step in range(steps):
            rows = slice(first + step, length)
            if step:
                joined, rest = self._join(embeddings[rows], outputs[-1][:-1])
                known.append(self._keys(joined, cos[rows], sin[rows]))
            q = rotate(self._heads(joined, "q_proj", shape.heads), cos[rows], sin[rows])
            out = self._weight("layers.0.self_attn.o_proj")
            hidden = rest + functional.linear(self._attend(q, known, first), out)
            outputs.append(hidden + self._mlp(self._norm(hidden, "layers.0.post_attention_layernorm")))
        return outputs

    def logits(self, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """``[n, d]`` outputs of the layer -> ``[n, D]``, or only the draft tokens ``wanted``."""
        rows = self._weight("lm_head")
        return functional.linear(self._norm(hidden, "norm"), rows if wanted is None else rows[wanted])

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the layer, and where its residual sum starts."""
        normed = self._norm(feature, "layers.0.hidden_norm")
        rest = normed if self.shape.norm_before_residual else feature
        return torch.cat([self._norm(embedded, "layers.0.input_layernorm"), normed], -1), rest

    def _attend(self, q: Tensor, known: list[tuple[Tensor, Tensor]], first: int) -> Tensor:
        """Row i sees the target's keys up to ``first + i``, then one drafted key a step, up to its own."""
        n, groups = q.shape[0], self.shape.heads // self.shape.kv_heads
        keys, values = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in known[0])
        q = q.transpose(0, 1) * self.shape.head_dim**-0.5
        place = torch.arange(n, device=q.device)[:, None] + first
        future = torch.arange(keys.shape[1], device=q.device)[None] > place
        scores = [(q @ keys.transpose(1, 2)).masked_fill(future, -torch.inf)]
        drafted = [tuple(part[:n].repeat_interleave(groups, 1).transpose(0, 1) for part in pair) for pair in known[1:]]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in drafted]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., : keys.shape[1]] @ values
        for i, (_, value) in enumerate(drafted):
            mixed = mixed + weights[..., keys.shape[1] + i : keys.shape[1] + i + 1] * value
        return mixed.transpose(0, 1).flatten(1)

    def _keys(self, joined: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        keys = rotate(self._heads(joined, "k_proj", self.shape.kv_heads), cos, sin)
        return keys, self._heads(joined, "v_proj", self.shape.kv_heads)

    def _heads(self, joined: Tensor, name: str, heads: int) -> Tensor:
        weight = self._weight(f"layers.0.self_attn.{name}")
        return functional.linear(joined, weight).view(-1, heads, self.shape.head_dim)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up, down = (self._weight(f"layers.0.mlp.{name}_proj") for name in ("gate", "up", "down"))
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    def _weight(self, name: str) -> Tensor:
        """One matrix as the net computes with it."""
        weight: Tensor = self.weights[_key(name)]
        if not self.rounded or weight.shape[1] % BLOCK:
            return weight
        version, change = self._rounding.get(name, (-1, weight))
        if version != weight._version:
            with torch.no_grad():
                # drafting rounds what the checkpoint holds
                scale = self.tap_scale if name == "fc" else 1.0
                change = rounded4(weight / scale) * scale - weight
            self._rounding[name] = weight._version, change
        return weight + change

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weights[_key(name)], self.shape.norm_eps)


def _key(name: str) -> str:
    return name.replace(".", "_")  # a ParameterDict takes no dots


def _initial(size: tuple[int, ...]) -> Tensor:
    return torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02
