"""From logits to the law of the next token, and from the law to a token."""

from foredraft.sampling.drafting import RequestSampler
from foredraft.sampling.draw import draw, race
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import Purpose, RequestNoise, fresh_seed

__all__ = ["Purpose", "RequestNoise", "RequestSampler", "TokenLaw", "draw", "fresh_seed", "race"]
