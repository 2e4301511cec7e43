"""Figures of the first reference study (RTX 5080, torch 2.8), quoted beside ours."""

from __future__ import annotations

SOURCE = "the first reference study: RTX 5080, torch 2.8"
PARAMETERS = {"target": "388K, 4 layers", "drafter": "108K, 1 layer"}
MEAN_ACCEPTED = {1: 0.91, 2: 1.66, 3: 2.56, 4: 2.95, 6: 4.10, 8: 4.85}
ALL_ACCEPTED = {1: 0.913, 2: 0.780, 3: 0.760, 4: 0.600, 6: 0.537, 8: 0.350}
TARGET_MS = 1.243
DRAFT_MS = 0.507
STEP_MS = {1: 1.750, 2: 2.257, 3: 2.764, 4: 3.271, 6: 4.286, 8: 5.300}
SPEEDUP = {1: 1.36, 2: 1.46, 3: 1.60, 4: 1.50, 6: 1.48, 8: 1.37}
BEST_K = 3
TV_MEAN = 0.115
TV_MAX = 0.657
TV = {"drafter's own law": 0.6571, "rejection": 0.0018, "direct": 0.0035}
