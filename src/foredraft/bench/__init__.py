"""The bench: foredraft beside the engines that a user would pick instead, on the same weights, in one run.

Every engine runs in its own process and environment and speaks the few JSON messages of
:mod:`foredraft.bench.workers.serve`; only one of them computes at any time.
"""
