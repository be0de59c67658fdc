"""Raw tensors in, raw tensors out: each fast op beside its plain twin, and the table that chooses."""

from ddtree.ops.rows import FULL_VIEW, Rows, View
from ddtree.ops.select import Ops, reference_ops, select_ops

__all__ = ["FULL_VIEW", "Ops", "Rows", "View", "reference_ops", "select_ops"]
