"""Models of transformers whose layers lie on several devices, as accelerate distributes them."""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from foredraft.errors import ConfigError

DeviceMap: TypeAlias = str | Mapping[str, int | str]
"""``auto``, ``balanced``, ``balanced_low_0``, ``sequential``, a JSON file of a map, or a map: module -> device."""

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


def read_map(given: DeviceMap) -> str | dict[str, int | str]:
    """What transformers is to be given.

    Raises:
        ConfigError: It is no policy, no file and no map.
    """
    if isinstance(given, str) and given in POLICIES:
        return given
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(Path(given).read_text("utf-8"))
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"{given!r} is neither {', '.join(POLICIES)} nor a JSON file ({problem})",
                field="device_map",
                remedy='write {"model.embed_tokens": 0, …} into the file',
            ) from None
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(device, int | str) for name, device in found.items()
    ):
        raise ConfigError("must say for each module its device", field="device_map", remedy="see docs/multi-device.md")
    return dict(found)


def map_options(given: DeviceMap) -> dict[str, Any]:
    """Arguments for ``from_pretrained``; what is kept on disk lies in a folder that goes when Python ends.

    Raises:
        ConfigError: accelerate is not installed, or the map is none.
    """
    found = read_map(given)
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("needs the package accelerate", field="device_map", remedy="pip install accelerate")
    folder = tempfile.mkdtemp(prefix="foredraft-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": found, "offload_folder": folder}


def first_device(model: Any) -> torch.device:
    """Where its inputs are to be and its logits come out: accelerate brings them there and back."""
    if getattr(model, "hf_device_map", None) is None:
        device: torch.device = model.device
        return device
    hook = getattr(model, "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return torch.device("cpu" if place is None else place)
