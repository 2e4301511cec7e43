"""Public testing tools for people who write drafters, rules or models: fakes, exact laws, statistics of samples."""

from foredraft.testing.law import accepted_law, exact_law, expected_tokens, law_of_drafts, plain_law
from foredraft.testing.stats import goodness_of_fit, total_variation, tv_noise, two_sample
from foredraft.testing.table import ScriptedDrafter, TableModel
from foredraft.testing.trees import trees

__all__ = [
    "ScriptedDrafter",
    "TableModel",
    "accepted_law",
    "exact_law",
    "expected_tokens",
    "goodness_of_fit",
    "law_of_drafts",
    "plain_law",
    "total_variation",
    "trees",
    "tv_noise",
    "two_sample",
]
