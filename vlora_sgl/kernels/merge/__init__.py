"""Merging a LoRA adapter into the base weights, all layers in one launch: ``W = round(W0 + s B A)`` and ``W = W0``."""

from vlora_sgl.kernels.merge.folded import FoldTable, FoldTarget, loss
from vlora_sgl.kernels.merge.kernel import BiasTarget, MergeTable, MergeTarget, MergeTile
from vlora_sgl.kernels.merge.reference import merge_reference, ulp_distance

__all__ = [
    "BiasTarget",
    "FoldTable",
    "FoldTarget",
    "MergeTable",
    "MergeTarget",
    "MergeTile",
    "loss",
    "merge_reference",
    "ulp_distance",
]
