"""Log-probabilities of a prompt's own tokens, collected while it is read.

Row i of a pass says what may follow its token i, so the rows of a prompt's chunk score the tokens after them. Ordinary
chunks ask for no rows at all; these ask for all of theirs, and are cut so that the rows of one pass stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.engine.result import TokenLogprob
from foredraft.errors import NumericalError

if TYPE_CHECKING:
    from foredraft.engine.request import Request

BYTES = 32 * 2**20
"""About the most that the rows of logits of one step's prompts may take."""


def rows_of_a_step(vocab_size: int) -> int:
    """How many tokens of prompts that want scores are read in one step, of all requests together."""
    return max(BYTES // (4 * vocab_size), 1)


def unscored(request: Request) -> bool:
    """Whether it wants its prompt scored and is not there yet; what the cache has read already would have no rows."""
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < request.prompt_length


def collect(request: Request, start: int, logits: Tensor) -> None:
    """Takes in one chunk; tokens that are known already, since the prompt is read again, are passed over.

    Args:
        start: Position of the first token of the chunk.
        logits: ``[n, V]`` a row for each token of the chunk.

    Raises:
        NumericalError: A row is no law.
    """
    found, top = request.prompt_logprobs, request.params.prompt_logprobs
    assert top is not None
    if not found:
        found.append(None)
    first = len(found) - 1 - start  # the row that scores the next token
    last = min(len(logits), request.prompt_length - 1 - start)
    if 0 <= first < last:
        tokens = request.ids[start + first + 1 : start + last + 1]
        found.extend(token_logprobs(logits[first:last], tokens, top))


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability of each token, and of the likeliest ``top``, under its own unfiltered row of ``[n, V]``.

    Raises:
        NumericalError: A row holds NaN or +inf, or nothing but -inf.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logs = wide.log_softmax(-1)
    if bool(logs.isnan().any()):
        raise NumericalError("a row of logits is no law", field="prompt")
    own = logs[range(len(tokens)), list(tokens)].tolist()
    best = logs.topk(min(top, logs.shape[-1]), -1)
    pairs = [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprob(*each) for each in zip(tokens, own, pairs, strict=True)]
