"""Supervised training on video-caption data: clips in, adapters or whole transformers of all experts out. It knows no rollout
engine but the one it samples with, no rewards and no Ray.
"""
