"""Training of drafters: the target writes its own text, a small head learns to foresee it."""
