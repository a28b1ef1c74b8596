"""Prompt records and clips in (JSON lines, video files), validated; their seeded order out. It knows no model, no engine and
no trainer.
"""

from miles_wan.data.clips import ClipRecord, ClipSet, load_clips
from miles_wan.data.images import CropReport, crop_report
from miles_wan.data.order import RecordOrder
from miles_wan.data.prompts import Dataset, load_records

__all__ = [
    "ClipRecord",
    "ClipSet",
    "CropReport",
    "Dataset",
    "RecordOrder",
    "crop_report",
    "load_clips",
    "load_records",
]
