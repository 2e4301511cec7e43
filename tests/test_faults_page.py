"""docs/faults.md names only tests that exist, and a drafter that speaks another vocabulary never gets that far."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig import model

from foredraft import Engine
from foredraft.drafters import ModelDrafter
from foredraft.errors import VocabularyMismatchError

ROOT = Path(__file__).parent.parent


def test_every_guard_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/faults.md").read_text()))
    defined = {
        name
        for file in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(named) > 30
    assert named <= defined


@pytest.mark.parametrize("size", [4, 7, 9, 32])
def test_drafters_of_another_vocabulary_are_refused(size: int) -> None:
    with pytest.raises(VocabularyMismatchError, match=f"{size} tokens, the target 8"):
        Engine(target=model(), drafter=ModelDrafter(model(vocab=size)))
