"""Our ``--drafter NAME:ARG`` as vLLM's ``--speculative-config``, or the reason why vLLM cannot do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError

DEFAULT_K = {"lookup": 5, "suffix": 16, "model": 4, "eagle3": 3}
"""Draft lengths where neither the user nor the head's checkpoint says one; vLLM has no ``auto``."""
EMBEDDED = "smollm2-135m-eagle3"
SPECULATIVE = "drafter"

_WHY_NOT = {
    "tree": "vLLM verifies chains only, no trees",
    "lookup-tree": "vLLM verifies chains only, no trees",
    "combined": "vLLM runs one drafter only",
    "early-exit": "vLLM cannot draft with the target's own layers",
}
_INSTEAD = "use eagle3:FOLDER, model:NAME, lookup or suffix, or --plain"


@dataclass(frozen=True, slots=True)
class Model:
    """A model as vLLM is told of it.

    Attributes:
        name: Folder or hub id.
        config: Its ``config.json``; empty for a hub id, which only vLLM reads.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How vLLM is to draft.

    Attributes:
        config: Its ``--speculative-config``.
        notes: What differs from the same drafter here, a sentence each.
        modules: Python modules that vLLM needs for it.
    """

    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def find_model(spec: str, option: str) -> Model:
    """A folder of safetensors or a hub id.

    Raises:
        ConfigError: vLLM cannot read it: a GGUF file, a catalogue name (they are GGUF files), or nothing at all.
    """
    from foredraft.models.catalog import find

    path = Path(spec).expanduser()
    if find(spec) is not None or path.suffix == ".gguf":
        stem = path.stem if path.suffix == ".gguf" else spec
        raise ConfigError(
            f"vLLM does not read {spec}, a GGUF file",
            field=option,
            remedy=f"write it as safetensors ('foredraft export {spec} --out {stem}-dense') and name that folder",
        )
    if path.is_dir():
        return Model(str(path.resolve()), _read_config(path, option))
    if spec.count("/") == 1 and not path.is_absolute() and not path.exists() and not spec.startswith((".", "~")):
        return Model(spec)
    raise ConfigError(
        f"{spec!r} is no folder and no hub id", field=option, remedy="give a model's folder, or a hub id (owner/name)"
    )


def _read_config(folder: Path, option: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no readable config.json ({getattr(error, 'strerror', None) or error})",
            field=option,
            remedy="give the folder of a model",
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/config.json is not an object", field=option, remedy="give the folder of a model")
    return found


def translate(drafter: str, k: int | None, target: Model) -> Speculation:
    """What vLLM is to do for ``--drafter``.

    Args:
        drafter: ``NAME`` or ``NAME:ARG``.
        k: Draft length, at least 1; None takes the head's own, or :data:`DEFAULT_K`.
        target: The model that is served.

    Raises:
        ConfigError: vLLM cannot draft so; the message says why and what it can.
    """
    name, _, argument = drafter.partition(":")
    known: dict[str, Callable[[str, int | None, Model], Speculation]] = {
        "lookup": _lookup,
        "suffix": _suffix,
        "model": _model,
        "eagle3": _eagle3,
    }
    if name not in known:
        why = _WHY_NOT.get(name, "it is not translated for vLLM")
        raise ConfigError(f"{drafter}: {why}", field=SPECULATIVE, remedy=_INSTEAD)
    return known[name](argument, k, target)


def _lookup(argument: str, k: int | None, target: Model) -> Speculation:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in argument.split(",")] if argument else [4, 2]
    longest, shortest = numbers[0], numbers[1] if len(numbers) > 1 else min(2, numbers[0])
    if len(numbers) > 2 or not 1 <= shortest <= longest:
        raise ConfigError(
            f"lookup:{argument} is not MAX or MAX,MIN", field=SPECULATIVE, remedy="for example lookup:4,2"
        )
    return Speculation(
        {
            "method": "ngram",
            "num_speculative_tokens": k or DEFAULT_K["lookup"],
            "prompt_lookup_max": longest,
            "prompt_lookup_min": shortest,
        }
    )


def _suffix(argument: str, k: int | None, target: Model) -> Speculation:
    names = {
        "depth": ("suffix_decoding_max_tree_depth", int),
        "factor": ("suffix_decoding_max_spec_factor", float),
        "min_prob": ("suffix_decoding_min_token_prob", float),
    }
    config: dict[str, Any] = {
        "method": "suffix",
        "num_speculative_tokens": k or DEFAULT_K["suffix"],
        "suffix_decoding_max_cached_requests": 0,
    }
    notes = ["suffix: vLLM's pool of past outputs is shared by all users, so it is off; each text drafts from itself"]
    for part in filter(None, argument.split(",")):
        key, _, text = part.partition("=")
        if part == "pool=0":
            notes = []
        elif key in names:
            try:
                config[names[key][0]] = names[key][1](text)
            except ValueError:
                raise ConfigError(
                    f"{part!r} is not {key}=NUMBER", field=SPECULATIVE, remedy="for example suffix:depth=24,factor=2"
                ) from None
        else:
            why = {
                "pool": "vLLM has one pool for all users, none by tenant",
                "file": "vLLM keeps no pool in a file",
                "tree": "vLLM verifies chains only, no trees",
            }.get(key, "there is no such option")
            remedy = "write pool=0" if key == "pool" else "drop it (depth, factor, min_prob and pool=0 can be given)"
            raise ConfigError(f"suffix, {part}: {why}", field=SPECULATIVE, remedy=remedy)
    return Speculation(config, tuple(notes), ("arctic_inference",))


def _model(argument: str, k: int | None, target: Model) -> Speculation:
    if not argument:
        raise ConfigError("model names no model", field=SPECULATIVE, remedy="write model:FOLDER or model:OWNER/NAME")
    name, _, rest = argument.partition(",")
    before, _, layers = name.rpartition("@")
    if before and layers.isdecimal():
        raise ConfigError(
            f"model:{argument}: vLLM loads models whole", field=SPECULATIVE, remedy=f"write model:{before}"
        )
    if rest:
        raise ConfigError(
            f"model:{argument}: vLLM's drafts have one length", field=SPECULATIVE, remedy=f"write model:{name}"
        )
    model = find_model(name, SPECULATIVE)
    _same("vocabulary", model.config.get("vocab_size"), target.config.get("vocab_size"))
    return Speculation(
        {"method": "draft_model", "model": model.name, "num_speculative_tokens": k or DEFAULT_K["model"]}
    )


def _eagle3(argument: str, k: int | None, target: Model) -> Speculation:
    head, found, _ = argument.rpartition("bits=")
    if found and (not head or head.endswith(",")):
        raise ConfigError(
            "vLLM keeps the number type of the head's file",
            field=SPECULATIVE,
            remedy=f"write eagle3:{head}".rstrip(":,"),
        )
    folder = Path(argument).expanduser() if argument else Path(str(files("foredraft") / "assets" / EMBEDDED))
    config = _read_config(folder, SPECULATIVE)
    if config.get("speculators_model_type") != "eagle3":
        raise ConfigError(
            f"{folder} is not an EAGLE-3 head in the speculators layout",
            field=SPECULATIVE,
            remedy=f"write it so: foredraft export {folder} --out FOLDER --verifier NAME",
        )
    layer = config.get("transformer_layer_config", {})
    taps = [int(tap) for tap in config.get("eagle_aux_hidden_state_layer_ids") or ()]
    if taps != sorted(set(taps)):
        # It collects each layer once, in the order of the layers, whatever the list says.
        raise ConfigError(
            f"the head taps layers {', '.join(map(str, taps))}; vLLM takes each layer once, in order",
            field=SPECULATIVE,
            remedy="train a head whose taps are different layers, in order",
        )
    _same("vocabulary", layer.get("vocab_size"), target.config.get("vocab_size"))
    _same("width", config.get("target_hidden_size"), target.config.get("hidden_size"))
    layers = target.config.get("num_hidden_layers")
    if layers is not None and taps and taps[-1] > layers:
        raise ConfigError(
            f"the head taps layer {taps[-1]}, the target has {layers}",
            field=SPECULATIVE,
            remedy="use a head trained for this target",
        )
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    recommended = methods[0].get("speculative_tokens") or DEFAULT_K["eagle3"]
    return Speculation(
        {"method": "eagle3", "model": str(folder.resolve()), "num_speculative_tokens": k or int(recommended)}
    )


def _same(what: str, drafters: Any, targets: Any) -> None:
    """Sizes that are known on both sides must agree."""
    if drafters is not None and targets is not None and drafters != targets:
        raise ConfigError(
            f"the drafter was made for a target of {what} {drafters}, this one has {targets}",
            field=SPECULATIVE,
            remedy="use a drafter made for this target",
        )
