"""Frames in, scores out: built-in and user-written rewards and their weighted sum. It knows no engine and no trainer."""
