"""One module an engine. They run in that engine's own environment and import nothing of foredraft but ``serve``."""
