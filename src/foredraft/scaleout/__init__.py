"""The same target and drafter on a cluster: vLLM's server, started from our options, and its figures in our names."""
