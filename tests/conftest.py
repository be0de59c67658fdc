"""One thread for torch: tests run side by side, and toys are too small to share out."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
