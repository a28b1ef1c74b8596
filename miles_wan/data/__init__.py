"""Prompt records in (JSON lines), validated; their seeded order out. It knows no model, no engine and no trainer."""

from miles_wan.data.images import CropReport, crop_report
from miles_wan.data.order import RecordOrder
from miles_wan.data.prompts import Dataset, load_records

__all__ = ["CropReport", "Dataset", "RecordOrder", "crop_report", "load_records"]
