"""A given first frame stays clean, has timestep 0 for its tokens only, and never goes missing silently."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from golden_data import GOLDEN, padded_embeds
from safetensors.torch import load_file

from miles_wan.wan.conditioning import build_model_input, image_channels, sampled_mask

B, C, F, H, W = 2, 48, 3, 4, 6
TOKENS = H * W // 4  # of one latent frame, patches of 2 x 2
YES, NO = torch.tensor([True, True]), torch.tensor([False, False])


@pytest.fixture(scope="module")
def transformer() -> WanTransformer3DModel:
    model = WanTransformer3DModel.from_config(
        WanTransformer3DModel.load_config(GOLDEN / "tiny_ti2v_transformer_config.json")
    )
    model.load_state_dict(load_file(GOLDEN / "tiny_ti2v_transformer.safetensors"))
    return model.eval().requires_grad_(False)


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, C, F, H, W, generator=generator), torch.randn(B, C, 1, H, W, generator=generator)


def build(x, z, has_condition, *, timestep=(800.0, 874.9999), image_conditioning="first_frame"):
    return build_model_input(
        x,
        torch.tensor(timestep),
        condition_latent=z,
        has_condition=has_condition,
        image_conditioning=image_conditioning,
    )


def run(transformer, hidden_states, timestep):
    text = padded_embeds("prompt_embeds").expand(len(hidden_states), -1, -1)
    return transformer(hidden_states=hidden_states, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]


def test_the_first_frame_is_the_given_one_bitwise_and_the_rest_is_the_noisy_state():
    x, z = tensors()
    inputs = build(x, z, YES)
    assert torch.equal(inputs.hidden_states[:, :, :1], z)
    assert torch.equal(inputs.hidden_states[:, :, 1:], x[:, :, 1:])


def test_what_the_noisy_state_says_about_the_first_frame_does_not_matter():
    x, z = tensors()
    noisy = x.clone()
    noisy[:, :, 0] = float("nan")
    assert torch.equal(build(noisy, z, YES).hidden_states, build(x, z, YES).hidden_states)


def test_tokens_of_the_first_frame_have_timestep_zero_and_no_timestep_is_rounded():
    x, z = tensors()
    timestep = build(x, z, YES).timestep
    assert timestep.shape == (B, F * TOKENS)
    assert timestep.dtype == torch.float32
    assert torch.equal(timestep[:, :TOKENS], torch.zeros(B, TOKENS))
    expected = torch.tensor([[800.0], [874.9999]]).expand(B, (F - 1) * TOKENS)
    assert torch.equal(timestep[:, TOKENS:], expected)


def test_without_an_image_the_timestep_stays_one_number_and_everything_is_sampled():
    x, _ = tensors()
    inputs = build(x, None, NO)
    assert torch.equal(inputs.hidden_states, x)
    assert torch.equal(inputs.timestep, torch.tensor([800.0, 874.9999]))
    assert bool((inputs.mask == 1).all())


def test_the_mask_leaves_out_the_first_frame_of_records_with_an_image():
    x, _ = tensors()
    mask = sampled_mask(x, torch.tensor([True, False]))
    assert mask.shape == (B, 1, F, H, W)
    assert mask[0, :, 0].sum() == 0
    assert bool((mask[0, :, 1:] == 1).all())
    assert bool((mask[1] == 1).all())


def test_one_timestep_for_every_token_is_that_timestep(transformer):
    x, _ = tensors()
    one = run(transformer, x, torch.tensor([800.0, 874.9999]))
    every = run(transformer, x, torch.tensor([[800.0], [874.9999]]).expand(B, F * TOKENS))
    torch.testing.assert_close(every, one, rtol=0, atol=1e-6)


def test_timestep_zero_for_the_first_frame_changes_the_output(transformer):
    x, z = tensors()
    inputs = build(x, z, YES)
    scalar = run(transformer, inputs.hidden_states, torch.tensor([800.0, 874.9999]))
    per_token = run(transformer, inputs.hidden_states, inputs.timestep)
    assert float((per_token - scalar)[:, :, 1:].abs().max()) > 1e-3


def test_the_order_of_the_tokens_is_that_of_the_model(transformer):
    # Only the last frame's tokens get another timestep: the model must change most there.
    x, _ = tensors()
    base = torch.full((B, F * TOKENS), 800.0)
    moved = base.clone()
    moved[:, 2 * TOKENS :] = 100.0
    change = (run(transformer, x, moved) - run(transformer, x, base)).abs().mean(dim=(0, 1, 3, 4))
    assert int(change.argmax()) == 2


def test_a_batch_with_and_without_images_is_its_rows(transformer):
    x, z = tensors()
    mixed = build(x, z, torch.tensor([True, False]))
    both = run(transformer, mixed.hidden_states, mixed.timestep)
    with_image = build(x[:1], z[:1], YES[:1], timestep=(800.0,))
    text_only = build(x[1:], None, NO[:1], timestep=(874.9999,))
    for row, alone in enumerate((with_image, text_only)):
        expected = run(transformer, alone.hidden_states, alone.timestep)
        torch.testing.assert_close(both[row : row + 1], expected, rtol=0, atol=1e-5)
        assert torch.equal(mixed.mask[row : row + 1], alone.mask)
        assert torch.equal(mixed.hidden_states[row : row + 1], alone.hidden_states)


def test_an_image_whose_latent_is_missing_is_an_error():
    x, _ = tensors()
    with pytest.raises(ValueError, match="would train as text-to-video"):
        build(x, None, YES)


def test_an_image_for_a_model_that_takes_none_is_an_error():
    x, z = tensors()
    with pytest.raises(ValueError, match="needs a checkpoint with expand_timesteps"):
        build(x, z, YES, image_conditioning="none")


def test_a_bf16_state_keeps_float32_timesteps():
    x, z = tensors()
    inputs = build(x.bfloat16(), z, YES)
    assert inputs.hidden_states.dtype == torch.bfloat16
    assert inputs.timestep.dtype == torch.float32


def i2v(latents, channels, has_condition=YES):
    return build_model_input(
        latents,
        torch.tensor((800.0, 900.0)),
        condition_latent=channels,
        has_condition=has_condition,
        image_conditioning="channels",
    )


def test_the_channels_of_i2v_are_a_mask_and_the_latents_of_the_image():
    """As diffusers' WanImageToVideoPipeline.prepare_latents builds them: 1 in each of the four channels of latent frame 0."""
    latent = torch.randn(16, F, H, W, generator=torch.Generator().manual_seed(1))
    channels = image_channels(latent)
    assert channels.shape == (20, F, H, W)
    assert torch.equal(channels[:4, 0], torch.ones(4, H, W))
    assert not bool(channels[:4, 1:].any())
    assert torch.equal(channels[4:], latent)


def test_in_i2v_every_frame_is_sampled_and_has_the_timestep():
    generator = torch.Generator().manual_seed(2)
    latents, channels = (
        torch.randn(B, 16, F, H, W, generator=generator),
        torch.randn(B, 20, F, H, W, generator=generator),
    )
    inputs = i2v(latents, channels)
    assert torch.equal(inputs.hidden_states, torch.cat([latents, channels], dim=1))
    assert torch.equal(inputs.state, latents)
    assert torch.equal(inputs.timestep, torch.tensor((800.0, 900.0)))
    assert bool(inputs.mask.all())


@pytest.mark.parametrize("given", [NO, torch.tensor([True, False])])
def test_i2v_without_an_image_is_refused(given):
    latents, channels = torch.zeros(B, 16, F, H, W), torch.zeros(B, 20, F, H, W)
    with pytest.raises(ValueError, match="needs the latents of a first image"):
        i2v(latents, channels, given)
    with pytest.raises(ValueError, match="needs the latents of a first image"):
        i2v(latents, None)
