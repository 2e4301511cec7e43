"""The demo's prompts: from free writing, where a draft rarely holds, to copying, where it nearly always does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    name: str
    text: str


_CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance - amount
        return self.balance
"""

_ARTICLE = """\
The harbour of Lindby froze over on the third of January, eleven days earlier than in any winter since records \
began in 1904. Fourteen fishing boats were caught inside the breakwater. The town council asked the regional \
ice-breaker, the Halvard, for help, but the Halvard was in dock with a damaged propeller and could not sail \
before the ninth. The crews then agreed to cut a channel by hand. For three days some sixty people, among them \
two school classes, sawed blocks of ice and pulled them ashore with tractors. On the sixth of January the \
first boat, the Marit, reached open water, and by the evening of the same day all fourteen had left. The \
council has since voted to buy a small ice-breaker of its own, which is to be shared with the two neighbouring \
towns and paid for over eight years."""

_TABLE = """\
[{"city": "Lisbon", "country": "Portugal", "population": 545796, "river": "Tagus"},
 {"city": "Vienna", "country": "Austria", "population": 2005760, "river": "Danube"},
 {"city": "Prague", "country": "Czechia", "population": 1384732, "river": "Vltava"},
 {"city": "Warsaw", "country": "Poland", "population": 1862402, "river": "Vistula"}]"""

PROMPTS = (
    DemoPrompt("chat question", "Why do leaves change colour in autumn? Explain it to a curious ten-year-old."),
    DemoPrompt(
        "code edit",
        f"Add a docstring to each method of this class. Write out the whole class.\n\n```python\n{_CODE}```",
    ),
    DemoPrompt("summary", f"Summarise this article in three sentences.\n\n{_ARTICLE}"),
    DemoPrompt("JSON copy", f"Repeat this JSON exactly, character for character.\n\n{_TABLE}"),
)
