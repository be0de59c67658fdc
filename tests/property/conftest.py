"""Kernels run in Triton's interpreter here, which triton turns to when it is first imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
