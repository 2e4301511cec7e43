"""Everything that a training run needs to go on exactly where it was, in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import ModelLoadError


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Writes the file in one move: after a crash the old one or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"state": json.dumps(state)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Raises ModelLoadError if the file is damaged or of another kind."""
    try:
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"is no checkpoint of a training run ({error})", field=str(path), remedy="delete it to start again"
        ) from None


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments and step counts of AdamW under the names of their parameters."""
    found = {}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"adam.{key}.{name}"] = torch.as_tensor(value)
    return found


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of :func:`optimizer_tensors`."""
    for name, parameter in names.items():
        moments = {key: tensors[f"adam.{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": tensors[f"adam.step.{name}"]} | moments
