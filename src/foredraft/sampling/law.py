"""The law of the next token: the one function that turns logits into probabilities, for target and drafter alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.errors import ConfigError, NumericalError
from foredraft.grammar import Grammar
from foredraft.kernels import available
from foredraft.kernels import law as kernel
from foredraft.sampling.compiled import CompiledLaw
from foredraft.sampling.draw import NoiseRow, race
from foredraft.sampling.filters import filtered
from foredraft.sampling.processors import Bans, Bias, Custom, Paths, Penalties


class TokenLaw:
    """The sampling controls of one request, applied to rows of logits at any prefix.

    It knows the prompt and the committed output; a row's *path* is what was drafted after them. One object serves
    drafter and target, so that p and q are always the same function of their logits.

    Args:
        params: The controls.
        prompt_ids: The prompt.
        vocab_size: ``V``, the width of the logits.
        eos_ids: Tokens that end a text (banned while ``min_tokens`` is not reached).
        bad_words_ids: ``params.bad_words`` as token sequences.
        grammar: The structure that ``params`` ask for, at its beginning.

    Attributes:
        vocab_size: ``V``.
        grammar: The request's grammar after the committed output, or None.

    Raises:
        ConfigError: A token id is not in ``[0, V)``; the field is named.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        *,
        eos_ids: frozenset[int] = frozenset(),
        bad_words_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._params = params
        self.vocab_size = vocab_size
        self._ids = list(prompt_ids)
        self._prompt_length = len(self._ids)
        self._check_ids(eos_ids, bad_words_ids)

        bad = (*params.bad_token_ids, *bad_words_ids)
        ends = eos_ids.union(params.stop_token_ids) if params.min_tokens else frozenset()
        neutral = params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0
        self._custom = Custom(params.processors) if params.processors else None
        self._penalties = (
            None
            if neutral
            else Penalties(
                vocab_size, self._ids, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            )
        )
        self._bias = Bias(params.logit_bias) if params.logit_bias else None
        bans = bad or ends or params.allowed_token_ids is not None
        self._bans = Bans(bad, params.allowed_token_ids, ends, params.min_tokens) if bans else None
        self.grammar = grammar
        self._plain = not (self._custom or self._penalties or self._bias or self._bans or grammar)
        # Where there is nothing else, penalties and bias are left to the kernels, too.
        self._sparse = not (self._custom or self._bans or grammar)
        self._compiled: CompiledLaw | None = None
        if CompiledLaw.can(params):
            self._compiled = CompiledLaw(params, *((self._penalties, self._bias) if self._sparse else (None, None)))

    @property
    def greedy(self) -> bool:
        return self._params.greedy

    @property
    def plain(self) -> bool:
        """Whether nothing changes logits before temperature and filters."""
        return self._plain

    @property
    def alone(self) -> kernel.Controls | None:
        """What the kernels need to make laws by themselves: temperature and filters, if there is nothing else."""
        return self._compiled.controls if self._plain and self._compiled is not None and available() else None

    def commit(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output that all later rows follow."""
        self._ids.extend(tokens)
        if self._penalties:
            self._penalties.commit(tokens)
        if self.grammar:
            self.grammar.commit(tokens)

    def probs(self, logits: Tensor, paths: Paths) -> Tensor:
        """The law of each row.

        Args:
            logits: ``[n, V]``, any float dtype; not changed.
            paths: n paths; row i follows prompt + output + ``paths[i]``.

        Returns:
            ``[n, V]`` probabilities after all processors and filters, on the CPU, float64 if the logits are, else
            float32.

        Raises:
            NumericalError: A row holds NaN or +inf, or no token is left.
        """
        rows = self._rows(logits, paths)
        scores = None if self._sparse else self._scores(rows, logits, paths)
        if self._compiled is not None and kernel.suits(rows):
            law = self._compiled(rows if scores is None else scores, paths)
            if law is not None:
                return law
        if scores is None:
            scores = self._scores(rows, logits, paths)
        self._argmax_checked(scores, logits)
        return filtered(scores, self._params)

    def laws(self, logits: Tensor, paths: Paths) -> Tensor | LazyLaws:
        """:meth:`probs`, each row made when it is looked at, where rows do not depend on each other."""
        if not self._sparse:
            return self.probs(logits, paths)
        rows = self._rows(logits, paths)
        return LazyLaws(self, rows, paths, self._compiled if kernel.suits(rows) else None)

    def argmax(self, logits: Tensor, paths: Paths) -> list[int]:
        """The likeliest token of each row after all processors, lowest id on ties: the greedy law's token.

        Arguments and errors are those of :meth:`probs`.
        """
        scores = self._scores(self._rows(logits, paths), logits, paths)
        tokens = kernel.argmax(scores) if kernel.suits(scores) else None
        return self._argmax_checked(scores, logits) if tokens is None else tokens

    def confidence(self, logits: Tensor, paths: Paths) -> Tensor:
        """``[n, V]``: the law at temperature 1 without filters: how sure a greedy request's drafter is of each token.

        Arguments and errors are those of :meth:`probs`.
        """
        scores = self._scores(self._rows(logits, paths), logits, paths)
        self._argmax_checked(scores, logits)
        return torch.softmax(scores, -1)

    def ended(self, path: Sequence[int]) -> bool:
        """Whether the request's grammar is complete after ``path``, so that the text ends there."""
        written = len(self._ids) - self._prompt_length + len(path)
        return self.grammar is not None and written >= self._params.min_tokens and self.grammar.ended(path)

    def rewind(self) -> None:
        """Puts stateful processors back to the committed state (call it between drafting and verification)."""
        if self._custom:
            self._custom.rewind()

    def settle(self, path: Sequence[int]) -> None:
        """Makes the state after the row of ``path``, asked for since the last :meth:`rewind`, the committed one."""
        if self._custom:
            self._custom.settle(path)

    def _rows(self, logits: Tensor, paths: Paths) -> Tensor:
        """``[n, V]`` logits on the CPU, float32 or float64; themselves if they are there."""
        if logits.shape != (len(paths), self.vocab_size):
            raise ConfigError(f"shape {tuple(logits.shape)} is not ({len(paths)}, {self.vocab_size})", field="logits")
        if logits.requires_grad or not logits.is_cpu:
            logits = logits.detach().cpu()
        return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

    def _scores(self, scores: Tensor, logits: Tensor, paths: Paths) -> Tensor:
        """``[n, V]`` processed logits; the logits themselves where there is nothing to process."""
        if self._plain:
            return scores
        if scores.data_ptr() == logits.data_ptr():
            scores = scores.clone()
        if self._custom:
            scores = self._custom.apply(scores, paths, self._ids)
        values = scores.numpy()
        if self._penalties:
            self._penalties.apply(values, paths)
        if self._bias:
            self._bias.apply(values)
        if self._bans:
            self._bans.apply(values, paths, self._ids, len(self._ids) - self._prompt_length)
        if self.grammar:
            self.grammar.apply(values, paths)
        return scores

    def _argmax_checked(self, scores: Tensor, logits: Tensor) -> list[int]:
        # One pass: numpy's argmax finds the first NaN if there is one, else the first maximum. Looking at that one
        # score tells NaN, +inf and a row of -inf. (torch's own argmax is nine times slower on a CPU.)
        values = scores.numpy()
        tokens: list[int] = values.argmax(-1).tolist()
        for row, token in enumerate(tokens):
            if not math.isfinite(values[row, token]):
                self._complain(row, float(values[row, token]), logits[row])
        return tokens

    def _complain(self, row: int, worst: float, logits: Tensor) -> None:
        raw_max = float(logits.max())
        if worst != -math.inf:
            name = "NaN" if math.isnan(worst) else "+inf"
            field = "processors" if math.isfinite(raw_max) else "logits"
            raise NumericalError(f"row {row} holds {name}", field=field)
        if raw_max == -math.inf:
            raise NumericalError(f"row {row} is -inf everywhere, so no token is possible", field="logits")
        candidates = {
            "allowed_token_ids": self._params.allowed_token_ids is not None,
            "bad_token_ids": bool(self._params.bad_token_ids),
            "bad_words": bool(self._params.bad_words),
            "min_tokens": self._params.min_tokens > 0,
            "processors": self._custom is not None,
        }
        fields = [field for field, active in candidates.items() if active]
        if self.grammar:
            fields.append(self.grammar.field)
        raise NumericalError(
            f"row {row} has no token left", field=" or ".join(fields), remedy="allow more tokens or ban fewer"
        )

    def _check_ids(self, eos_ids: frozenset[int], bad_words_ids: Sequence[Sequence[int]]) -> None:
        params = self._params
        fields: dict[str, Iterable[int]] = {
            "prompt": self._ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_token_ids": (token for ids in params.bad_token_ids for token in ids),
            "bad_words": (token for ids in bad_words_ids for token in ids),
            "stop_token_ids": params.stop_token_ids,
            "eos_ids": eos_ids,
        }
        for field, ids in fields.items():
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(f"token id {token} is not in [0, {self.vocab_size})", field=field)


class LazyLaws:
    """The rows of :meth:`TokenLaw.probs`, each made when it is looked at; draws and single probabilities make none.

    Attributes:
        shape: ``(n, V)``.
    """

    def __init__(self, law: TokenLaw, logits: Tensor, paths: Paths, compiled: CompiledLaw | None) -> None:
        self.shape = logits.shape
        self._law, self._logits, self._paths, self._compiled = law, logits, paths, compiled
        self._last: tuple[int, Tensor] | None = None  # rules look at a row again before they go on to the next

    def __getitem__(self, row: int) -> Tensor:
        if self._last is None or self._last[0] != row:
            self._last = row, self._law.probs(self._logits[row : row + 1], self._paths[row : row + 1])[0]
        return self._last[1]

    def chances(self, tokens: Sequence[int]) -> list[float]:
        """The probability of one token, ``0 <= token < V``, in each of the first rows. Errors are those of the law."""
        if self._compiled is not None and tokens:
            found = self._compiled.chances(self._logits, self._paths[: len(tokens)], tokens)
            if found is not None:
                return found
        return [float(self[row][token]) for row, token in enumerate(tokens)]

    def draw(self, row: int, u: float, weight: float, without: int) -> tuple[int, float] | None:
        """Draws from ``weight`` times one row, leaving out one token (-1 for none).

        Returns:
            The token and the mass that it was drawn from; -1 for the token if that is 0. None if only the row itself
            will do.
        """
        if self._compiled is None:
            return None
        return self._compiled.draw(self._logits, row, self._paths[row], u, weight, without)

    def race(self, row: int, noise: NoiseRow) -> int:
        """:func:`foredraft.sampling.draw.race` over one row."""
        if self._compiled is not None:
            winner = self._compiled.race(self._logits, row, self._paths[row], noise.seed, noise.position)
            if winner is not None and winner >= 0:
                return winner
        return race(self[row], noise)
