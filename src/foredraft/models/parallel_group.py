"""How the processes of a tensor-parallel model talk: orders from rank 0, and columns gathered from all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, distributed_c10d

from foredraft.errors import ForedraftError, UnsupportedModelError

_ORDER_WORDS = 1024
"""Numbers of the first broadcast of an order; a longer order takes a second one."""
_IDLE = timedelta(days=365)


class Group:
    """The ``size`` processes that hold one model.

    Orders travel over gloo on the host, since they are lists of numbers. Columns travel over NCCL where every process
    has a GPU of its own, else over gloo, through host memory if need be.

    Args:
        rank: This process; 0 gives the orders.
        size: How many there are.
        device: This process's device.

    Attributes:
        busy: Whether all processes are at the same order, so that they can exchange columns.
        lost: Why the model cannot be used any more; None as long as it can.
        witness: Says what became of the other processes, where this one started them.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.busy = False
        self.lost: str | None = None
        self.witness: Callable[[], str | None] = lambda: None
        self._orders: Any = None
        self._columns: Any = None
        self._on_host = not (device.type == "cuda" and torch.cuda.device_count() >= size)

    def connect(self, store: distributed_c10d.Store, local: bool, timeout: float) -> None:
        """Meets the other processes.

        Args:
            store: Where they find one another.
            local: Talk over this machine's loopback only.
            timeout: Seconds that a process waits for the columns of the others.
        """
        self._orders = self._gloo(distributed_c10d.PrefixStore("orders", store), local, _IDLE)
        columns, patience = distributed_c10d.PrefixStore("columns", store), timedelta(seconds=timeout)
        if self._on_host:
            self._columns = self._gloo(columns, local, patience)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = patience
            self._columns = ProcessGroupNCCL(columns, self.rank, self.size, options)

    def disconnect(self) -> None:
        """Ends the connections' threads while Python is whole: torn down with the interpreter they may abort it."""
        self._orders = self._columns = None
        gc.collect()

    def _gloo(self, store: distributed_c10d.Store, local: bool, timeout: timedelta) -> Any:
        if not local:
            return ProcessGroupGloo(store, self.rank, self.size, timeout)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return ProcessGroupGloo(store, self.rank, self.size, options)

    @contextmanager
    def order(self, words: Sequence[int] | None) -> Iterator[list[int]]:
        """One order, from its first word to the end of what it makes all processes do.

        Args:
            words: What rank 0 says; None in the others, which get it.

        Raises:
            ForedraftError: A process is gone, or was interrupted in the middle of an order: the model is lost.
        """
        if self.lost is not None:
            raise self._gone()
        self.busy = True
        try:
            yield self._broadcast(words)
        except UnsupportedModelError:
            raise
        except RuntimeError as error:
            self.lost = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._gone() from error
        except BaseException as error:
            self.lost = f"{type(error).__name__} in the middle of a pass"
            raise
        finally:
            self.busy = False

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """``[N, widths[rank]]`` of this process -> ``[N, sum(widths)]``, the same numbers in all.

        Raises:
            UnsupportedModelError: Not all processes are at this product: it was asked for outside a pass.
        """
        if not self.busy:
            raise UnsupportedModelError(
                "the target's weights are split over processes, and only its own passes can use them",
                field="tensor_parallel",
                remedy="use another drafter, or tensor_parallel=1",
            )
        if not x.shape[0]:
            return x.new_empty(0, sum(widths))
        widest = max(widths)
        padded = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        sent = padded.contiguous().view(torch.uint8)  # bytes: every backend knows them
        sent = sent.cpu() if self._on_host else sent
        parts = [torch.empty_like(sent) for _ in widths]
        self._columns.allgather([parts], [sent]).wait()
        whole = [part.to(x.device).view(x.dtype)[:, :width] for part, width in zip(parts, widths, strict=True)]
        return torch.cat(whole, 1)

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in all; the others give one of its shape and dtype."""
        sent = x.contiguous().view(torch.uint8).cpu() if self._on_host else x.contiguous().view(torch.uint8)
        self._columns.broadcast([sent]).wait()
        return sent.to(x.device).view(x.dtype)

    def _broadcast(self, words: Sequence[int] | None) -> list[int]:
        given = list(words or ())
        head = torch.zeros(_ORDER_WORDS, dtype=torch.int64)
        if words is not None:
            start = torch.tensor([len(given), *given[: _ORDER_WORDS - 1]])
            head[: len(start)] = start
        self._orders.broadcast([head]).wait()
        length = int(head[0])
        got: list[int] = head[1 : 1 + length].tolist()
        if length >= _ORDER_WORDS:
            rest = torch.zeros(length - len(got), dtype=torch.int64)
            if words is not None:
                rest.copy_(torch.tensor(given[len(got) :]))
            self._orders.broadcast([rest]).wait()
            got += rest.tolist()
        return got

    def _gone(self) -> ForedraftError:
        return ForedraftError(
            f"a process of the split target is gone or does not answer ({self.witness() or self.lost:.300})",
            field="tensor_parallel",
            remedy="load the model again",
        )


def split(total: int, parts: int, step: int = 1) -> list[int]:
    """``total`` in ``parts`` numbers: multiples of ``step``, larger ones first, and what is left over in the last."""
    units = total // step
    counts = [(units // parts + (i < units % parts)) * step for i in range(parts)]
    counts[-1] += total - sum(counts)
    return counts
