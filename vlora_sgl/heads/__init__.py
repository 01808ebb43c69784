"""Vision task heads: closed-set and dense answers after one prefill pass (V-LoRA, section 4.2.2)."""

from vlora_sgl.heads.base import Grid, VisionHead, grouped_linear
from vlora_sgl.heads.classify import ClassifyHead
from vlora_sgl.heads.count import CountHead
from vlora_sgl.heads.detect import Boxes, DetectHead
from vlora_sgl.heads.store import AdapterDescription, build_head, load_heads, read_description, save_heads

__all__ = [
    "AdapterDescription",
    "Boxes",
    "ClassifyHead",
    "CountHead",
    "DetectHead",
    "Grid",
    "VisionHead",
    "build_head",
    "grouped_linear",
    "load_heads",
    "read_description",
    "save_heads",
]
