"""Acceptance read off a running server's ``/metrics``: vLLM's or our own, in the names of docs/metrics.md."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ConfigError

PREFIXES = ("vllm:", "foredraft:")
_COUNTS = {
    "spec_decode_num_drafts_total": "num_spec_steps",
    "spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
    "generation_tokens_total": "completion_tokens",
    "request_steps_total": "num_steps",
}
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}


@dataclass(slots=True)
class Acceptance:
    """Counters of one model, or of one drafter of it.

    Attributes:
        counts: ``num_spec_steps``, ``num_draft_tokens``, ``num_accepted_draft_tokens``, ``completion_tokens``, and
            ``num_steps`` where the server counts steps that drafted nothing (vLLM does not).
        by_position: Accepted tokens by position in the draft, from 0.
        levels: ``running`` and ``waiting`` requests, where they are told.
    """

    counts: Counter[str] = field(default_factory=Counter)
    by_position: Counter[int] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)

    def since(self, before: Acceptance) -> Acceptance:
        """What was counted after ``before`` was read; a server that was started anew since then counts from 0."""
        counts, positions = Counter(self.counts), Counter(self.by_position)
        if all(counts[name] >= number for name, number in before.counts.items()):
            counts.subtract(before.counts)
            positions.subtract(before.by_position)
        return Acceptance(counts, positions, Counter(self.levels))

    def __add__(self, other: Acceptance) -> Acceptance:
        total = Acceptance(Counter(self.counts), Counter(self.by_position), Counter(self.levels))
        total.counts.update(other.counts)
        total.by_position.update(other.by_position)
        total.levels.update(other.levels)
        return total

    @property
    def alpha(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return _ratio(self.counts["num_accepted_draft_tokens"], self.counts["num_draft_tokens"])

    @property
    def tau(self) -> float | None:
        """1 + accepted tokens over steps that drafted; None if none did."""
        rate = _ratio(self.counts["num_accepted_draft_tokens"], self.counts["num_spec_steps"])
        return None if rate is None else 1 + rate

    @property
    def rates(self) -> list[float]:
        """Share of steps that drafted which accepted position 1, 2, …"""
        steps = self.counts["num_spec_steps"]
        return [self.by_position[i] / steps for i in range(max(self.by_position, default=-1) + 1)] if steps else []

    def to_dict(self) -> dict[str, Any]:
        """Names of docs/metrics.md."""
        found: dict[str, Any] = {name: int(self.counts[name]) for name in _COUNTS.values() if name in self.counts}
        found |= {
            "draft_acceptance_rate": self.alpha,
            "mean_acceptance_length": self.tau,
            "acceptance_rate_per_position": self.rates,
        }
        if self.counts.get("num_steps"):
            found["tokens_per_step"] = 1 + self.counts["num_accepted_draft_tokens"] / self.counts["num_steps"]
        return found | {name: int(level) for name, level in self.levels.items()}


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def read(text: str) -> dict[str, Acceptance]:
    """Counters by ``MODEL`` or, where the server tells them apart, ``MODEL DRAFTER``; engines of one model are added.

    Raises:
        ConfigError: The text is not Prometheus's, or no server's that is known.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigError(
            "prometheus-client is missing", remedy="install it: pip install 'foredraft[server]'"
        ) from None
    found: dict[str, Acceptance] = {}
    levels: dict[str, Counter[str]] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"the answer is not in Prometheus's format ({error})", field="url") from None
    known = False
    for sample in samples:
        name = next((sample.name.removeprefix(p) for p in PREFIXES if sample.name.startswith(p)), None)
        known = known or name is not None
        model = sample.labels.get("model_name", "")
        drafter = sample.labels.get("drafter")
        key = f"{model} {drafter}" if drafter is not None else model
        if name in _COUNTS:
            found.setdefault(key, Acceptance()).counts[_COUNTS[name]] += int(sample.value)
        elif name == _BY_POSITION:
            found.setdefault(key, Acceptance()).by_position[int(sample.labels["position"])] += int(sample.value)
        elif name in _GAUGES:
            levels.setdefault(model, Counter())[_GAUGES[name]] += int(sample.value)
    if not known:
        raise ConfigError(
            "there are no figures of vLLM or foredraft",
            field="url",
            remedy="name one of their servers, for example http://127.0.0.1:8000",
        )
    for model, gauges in levels.items():
        own = [acceptance for key, acceptance in found.items() if key == model or key.startswith(model + " ")]
        if len(own) == 1:
            own[0].levels.update(gauges)
        else:
            found.setdefault(model, Acceptance()).levels.update(gauges)
    return found


def fetch(url: str, key: str | None = None, timeout: float = 10.0) -> dict[str, Acceptance]:
    """Reads a server.

    Args:
        url: Its address; ``/v1`` or ``/metrics`` at the end changes nothing.
        key: API key of an admin, where the server wants one.
        timeout: Seconds.

    Raises:
        ConfigError: It cannot be reached, refuses, or shows something else.
    """
    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address", field="url", remedy="for example http://127.0.0.1:8000")
    asked = urllib.request.Request(f"{base}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as reply:
            text = reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        keyed = error.code in (401, 403)
        remedy = "put an admin's key into FOREDRAFT_API_KEY" if keyed else "name the server's own address"
        raise ConfigError(f"{base}/metrics answers {error.code}", field="url", remedy=remedy) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{base} cannot be reached ({reason})", field="url", remedy="start the server, or name another address"
        ) from None
    return read(text)
