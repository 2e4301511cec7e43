"""Drafters by name. A registry entry names a module; it is imported only when that drafter is asked for.

Other packages add drafters through the entry-point group ``foredraft.drafters``: the entry's name is the
drafter's, its object a :class:`~foredraft.drafters.base.Drafter` subclass.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.errors import ConfigError, DrafterError

ENTRY_POINT_GROUP = "foredraft.drafters"


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One registered drafter.

    Attributes:
        name: What ``--drafter`` takes.
        summary: One line.
        needs: What must be there to use it.
        argument: Syntax of what may follow ``name:``; empty if nothing may.
        factory: ``module:Class``.
    """

    name: str
    summary: str
    needs: str
    argument: str
    factory: str

    def load(self) -> type[Drafter]:
        """Imports the class.

        Raises:
            DrafterError: The module or class cannot be imported.
        """
        module, _, attribute = self.factory.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise DrafterError(
                f"cannot be imported from {self.factory} ({error})",
                field=f"drafter {self.name}",
                remedy="install or repair the package that registers it",
            ) from error
        if not (isinstance(found, type) and issubclass(found, Drafter)):
            raise DrafterError(f"{self.factory} is not a Drafter subclass", field=f"drafter {self.name}")
        return found


BUILT_IN = (
    DrafterEntry(
        "lookup",
        "copies what followed the last few tokens where they stood before (prompt lookup)",
        "nothing",
        "MAX or MAX,MIN: lengths of the n-grams to match (default 4,2)",
        "foredraft.drafters.lookup:LookupDrafter",
    ),
    DrafterEntry(
        "suffix",
        "copies what followed most often, in this text and in past outputs of the same tenant (suffix decoding)",
        "nothing",
        "depth=24,factor=1,min_prob=0.1,pool=64,file=PATH,tree: any of them; see docs/drafters.md",
        "foredraft.drafters.suffix:SuffixDrafter",
    ),
    DrafterEntry(
        "model",
        "a smaller model with the target's vocabulary writes ahead",
        "a model with the same tokenizer",
        "MODEL or MODEL@E: name, folder, .gguf file or hub id; E keeps its first E layers; ,doubt=H ends drafts early",
        "foredraft.drafters.model:ModelDrafter",
    ),
    DrafterEntry(
        "tree",
        "a smaller model or an EAGLE head drafts several continuations at once, as a tree",
        "what the drafter in it needs, and a target that reads trees",
        "MODEL, eagle3, eagle3:FOLDER or eagle1:FOLDER, then depth=6,branch=4,nodes=16,static; see docs/trees.md",
        "foredraft.drafters.tree:TreeDrafter",
    ),
    DrafterEntry(
        "lookup-tree",
        "copies what followed the last few tokens wherever they stood before, as a tree",
        "a target that reads trees",
        "MAX or MAX,MIN: lengths of the n-grams to match (default 4,2)",
        "foredraft.drafters.tree_lookup:LookupTreeDrafter",
    ),
    DrafterEntry(
        "combined",
        "several drafters: each step is drafted by the one that promises most",
        "what its drafters need",
        "A+B: two or more drafters with their arguments, for example suffix+model:NAME",
        "foredraft.drafters.combined:CombinedDrafter",
    ),
    DrafterEntry(
        "eagle3",
        "a small head foresees the target from its own hidden states",
        "a head trained for the target; one comes with smollm2-135m",
        "FOLDER of an EAGLE-3 checkpoint; without it the head that comes with smollm2-135m; ,bits=8 or 32 instead of 4",
        "foredraft.drafters.eagle:Eagle3Drafter",
    ),
    DrafterEntry(
        "eagle1",
        "a small head foresees the target's next feature, which the target's own LM head reads",
        "a head trained for the target, and a target of the built-in decoder's families",
        "FOLDER of an EAGLE-1 checkpoint in safetensors",
        "foredraft.drafters.eagle1:Eagle1Drafter",
    ),
    DrafterEntry(
        "vocabulary",
        "a smaller model with another tokenizer writes ahead",
        "a model with a tokenizer of its own",
        "MODEL or MODEL,METHOD: a model as above; METHOD is intersection, text or auto (default)",
        "foredraft.drafters.vocabulary:VocabularyDrafter",
    ),
    DrafterEntry(
        "encoder-decoder",
        "a smaller encoder-decoder model (T5 and its kind) writes ahead of a larger one",
        "a smaller model of the target's family, and an encoder-decoder target",
        "MODEL: folder or hub id of a sequence-to-sequence model in safetensors",
        "foredraft.drafters.encoder_decoder:EncoderDecoderDrafter",
    ),
    DrafterEntry(
        "early-exit",
        "the target's own first layers write ahead, without a second model or cache",
        "a target of the built-in decoder's families",
        "E or auto: the number of layers; auto (default) measures some",
        "foredraft.drafters.early_exit:EarlyExitDrafter",
    ),
)


@cache
def entries() -> tuple[DrafterEntry, ...]:
    """Every registered drafter: the built-in ones, then those of installed packages."""
    found = list(BUILT_IN)
    names = {entry.name for entry in found}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in names:
            raise ConfigError(
                f"two packages register the name {point.name!r}", field="drafter", remedy="uninstall one of them"
            )
        names.add(point.name)
        origin = f"package {point.dist.name}" if point.dist else "an installed package"
        found.append(DrafterEntry(point.name, f"from {origin}", f"see {origin}", "", point.value))
    return tuple(found)


def create(spec: str, context: DrafterContext) -> Drafter:
    """Makes the drafter that ``NAME`` or ``NAME:ARGUMENT`` asks for.

    Raises:
        ConfigError: Unknown name, or an argument that the drafter refuses.
    """
    name, _, argument = spec.partition(":")
    by_name = {entry.name: entry for entry in entries()}
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"no drafter is called {name!r}", field="drafter", remedy=f"{hint}registered: {', '.join(sorted(by_name))}"
        )
    return by_name[name].load().from_spec(argument or None, context)
