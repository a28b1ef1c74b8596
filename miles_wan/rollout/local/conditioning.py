"""What a record conditions on, encoded in this process. In: a record and its sampling settings. Out: ``Conditioning``. It
knows no transformer.
"""

from __future__ import annotations

from miles_wan.records import Conditioning, PromptRecord, SamplingSettings
from miles_wan.wan.facts import ImageConditioning
from miles_wan.wan.text import PromptEncoder, prompts_of
from miles_wan.wan.video import VideoCodec


def encode_conditioning(
    record: PromptRecord,
    sampling: SamplingSettings,
    *,
    text: PromptEncoder,
    codec: VideoCodec,
    image_conditioning: ImageConditioning,
) -> Conditioning:
    """Prompt, with guidance the negative one, and what the first image gives if the record has one.

    Raises:
        EngineError: an image that cannot be read.
    """
    embeds = [embedding.numpy() for embedding in text.encode(prompts_of(record, sampling.guidance_scale))]
    image = record.image_path
    latent = None
    if image is not None and image_conditioning == "channels":
        latent = codec.encode_image_channels(image, sampling.width, sampling.height, sampling.num_frames).numpy()
    elif image is not None:
        latent = codec.encode_image(image, sampling.width, sampling.height).numpy()
    return Conditioning(
        prompt_embeds=embeds[0],
        negative_prompt_embeds=embeds[1] if len(embeds) > 1 else None,
        condition_latent=latent,
    )
