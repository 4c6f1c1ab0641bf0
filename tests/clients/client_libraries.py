"""Small models of libraries for diffusion, segmentation, quantization and attention variants, as they build them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 4


class Client(nn.Module):
    """A library's model that takes one dict and returns a tensor, and its auxiliary loss if it has one."""

    def __init__(self, model: nn.Module, call: Callable[[Any, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.call(self.model, batch)


def conditional_unet() -> nn.Module:
    unet = import_module("diffusers").UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return Client(unet, lambda model, batch: model(batch["image"], torch.tensor(3), batch["context"]).sample)


def autoencoder() -> nn.Module:
    vae = import_module("diffusers").AutoencoderKL(
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    return Client(vae, lambda model, batch: model.decode(model.encode(batch["image"]).latent_dist.mode()).sample)


def flux() -> nn.Module:
    transformer = import_module("diffusers").FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )

    def call(model: Any, batch: dict[str, Tensor]) -> Any:
        image = batch["image"].flatten(2).transpose(1, 2)
        return model(
            hidden_states=image,
            encoder_hidden_states=batch["context"],
            pooled_projections=batch["context"].mean(1),
            timestep=torch.full((len(image),), 0.3, dtype=image.dtype),
            img_ids=torch.zeros(image.shape[1], 3),
            txt_ids=torch.zeros(batch["context"].shape[1], 3),
        ).sample

    return Client(transformer, call)


def u_net_with_deep_supervision() -> nn.Module:
    sizes: dict[str, Any] = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    net = import_module("monai.networks.nets").DynUNet(2, 4, 2, **sizes, deep_supervision=True)
    return Client(net, lambda model, batch: model(batch["image"]).mean(1))


def _decoder(**options: Any) -> nn.Module:
    library = import_module("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    tied = library.TransformerWrapper(
        num_tokens=50, max_seq_len=16, num_memory_tokens=3, tie_embedding=True, attn_layers=layers
    )
    return Client(tied, lambda model, batch: model(batch["tokens"]))


def tied_with_memory_tokens() -> nn.Module:
    return _decoder(alibi_pos_bias=True, attn_qk_norm=True, ff_glu=True)


def layers_that_run_twice() -> nn.Module:
    return _decoder(rel_pos_bias=True, layers_execute_order=(0, 1, 0, 1, 2, 3), residual_attn=True)


def _quantized(quantizer: str, **options: Any) -> nn.Module:
    codes = getattr(import_module("vector_quantize_pytorch"), quantizer)(dim=16, **options)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), codes, nn.Linear(16, 3))

    def call(model: Any, batch: dict[str, Tensor]) -> Any:
        quantized, _, loss = model[2](model[1](model[0](batch["context"])))
        return model[3](quantized), loss.mean()

    return Client(net, call)


def codebook_of_averages() -> nn.Module:
    """Its codebook is an average that the forward keeps, over all ranks."""
    return _quantized("VectorQuantize", codebook_size=8, decay=0.9, threshold_ema_dead_code=0)


def residual_codebooks() -> nn.Module:
    return _quantized("ResidualVQ", codebook_size=8, num_quantizers=2, threshold_ema_dead_code=0)


CLIENTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "UNet2DConditionModel": (conditional_unet, "diffusers"),
    "AutoencoderKL": (autoencoder, "diffusers"),
    "FluxTransformer2DModel": (flux, "diffusers"),
    "DynUNet": (u_net_with_deep_supervision, "monai"),
    "tied embedding": (tied_with_memory_tokens, "x_transformers"),
    "shared layers": (layers_that_run_twice, "x_transformers"),
    "VectorQuantize": (codebook_of_averages, "vector_quantize_pytorch"),
    "ResidualVQ": (residual_codebooks, "vector_quantize_pytorch"),
}


def batches(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.randn(SAMPLES, 4, 8, 8, generator=drawn),
            "context": torch.randn(SAMPLES, 5, 16, generator=drawn),
            "tokens": torch.randint(50, (SAMPLES, 12), generator=drawn),
        }
        for _ in range(count)
    ]


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch)
    output, auxiliary_loss = output if isinstance(output, tuple) else (output, 0.0)
    loss: Tensor = output.square().mean() + auxiliary_loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of lists of modules, the innermost first: what one would shard or recompute as a unit."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    members: list[Any] = [
        member for each in lists if len(each) > 1 for member in each
    ]  # x-transformers has None in some
    with_params = [member for member in members if member is not None and any(True for _ in member.parameters())]
    called = [member for member in with_params if not isinstance(member, (nn.ModuleList, nn.ModuleDict))]
    return list(dict.fromkeys(reversed(called)))
