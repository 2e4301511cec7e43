"""``python -m foredraft.models.parallel_worker OPTIONS``: one process of a split model, started by rank 0."""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """Loads this process's share with the options of rank 0 (JSON) and follows it to the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to answer
    from foredraft.models.loading import load_model

    load_model(**json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
