"""Flow-GRPO for Wan2.2 video models: SGLang rollouts, frame rewards, FSDP2 LoRA training, verified weight sync."""

__version__ = "0.1.0"
