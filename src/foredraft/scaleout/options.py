"""What ``foredraft serve --engine vllm`` adds to the options of the server: one field is one option."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from foredraft.config import Schema

Count = Annotated[int, Field(ge=1, le=4096)]


class ScaleOptions(Schema):
    """Who runs the model, and on how many devices."""

    engine: Literal["foredraft", "vllm"] = "foredraft"
    """Who runs the model: foredraft itself, or vLLM's server, started with what it can honour of the other options."""
    tensor_parallel: Count = 1
    """vLLM: devices that share the work of every layer."""
    pipeline_parallel: Count = 1
    """vLLM: groups of devices, each with its own layers."""
    data_parallel: Count = 1
    """vLLM: copies of the model, each with its own requests."""
    distributed_backend: Literal["mp", "ray"] | None = None
    """vLLM: who starts its workers: mp on this machine, ray on a cluster; without it vLLM chooses."""
    vllm_arg: tuple[str, ...] = ()
    """vLLM: an argument handed on as it is, such as --vllm-arg=--enable-expert-parallel."""
    vllm_python: str | None = None
    """vLLM: the Python that it is installed for; without it the bench's environment or foredraft's own."""
    dry_run: bool = False
    """vLLM: print the command that would be run, and end."""
