"""An OpenAI-compatible HTTP service over one engine; ``foredraft serve`` starts it, docs/server.md describes it."""
