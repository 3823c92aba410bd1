"""Which attention backend runs.

Owns the names and the choice that "auto" makes. Ignores how any of them computes and how speed is
measured (`engine.attention.choice`).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend
from engine.attention.choice import Setting, choose
from engine.attention.flashinfer import FlashInferPrefill, installed, refuse_unfit
from engine.attention.mla import LatentReference
from engine.attention.torch_fast import TorchAttention
from engine.attention.torch_ref import TorchReference
from engine.errors import InvalidRequest, Unsupported
from engine.models.spec import ModelSpec
from engine.user_cache import cache_folder

LATENT_BACKENDS = ("triton", "torch_ref")
KERNEL_BACKENDS = ("triton", "flashinfer")
"""Those that compute decode rows by kernels of ours, so that steps can be captured."""
BACKENDS = (*KERNEL_BACKENDS, "torch", "torch_ref")


def resolve_attention(name: str, spec: ModelSpec, device: torch.device | str, setting: Setting | None = None) -> str:
    """The concrete name for `name`, which may be "auto": with a `setting`, by a measurement where
    there is more than one answer."""
    if spec.latent is not None:
        if name not in ("auto", *LATENT_BACKENDS):
            raise Unsupported(field="attention", expected=f"one of {list(LATENT_BACKENDS)} over latents", actual=name)
        if name != "auto":
            return name
        return "triton" if torch.device(device).type == "cuda" and find_spec("triton") is not None else "torch_ref"
    if name == "auto":
        biased = any(layer.bias is not None for layer in spec.layers)
        if torch.device(device).type == "cuda" and find_spec("triton") is not None and not biased:
            return "triton" if setting is None or not installed() else _by_measurement(setting)
        return "torch" if all(layer.plain for layer in spec.layers) else "torch_ref"
    if name not in BACKENDS:
        raise InvalidRequest(field="attention", expected=f"auto or one of {list(BACKENDS)}", actual=name)
    if name == "flashinfer" and setting is not None:
        refuse_unfit(spec, setting.dtype, setting.deterministic)
    return name


def make_attention(
    name: str,
    spec: ModelSpec,
    device: torch.device | str,
    deterministic: bool = False,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Build a backend; one that cannot compute a layer of the spec refuses it by name. `dtype` is
    that of the key/value pool, the spec's by default."""
    name = resolve_attention(name, spec, device)
    if spec.latent is not None and name == "triton":
        from engine.attention.mla_triton import TritonLatent  # needs triton, which CPU installations lack

        return TritonLatent(spec, deterministic)
    if spec.latent is not None:
        return LatentReference(spec)
    if name in KERNEL_BACKENDS:
        from engine.attention.triton import TritonAttention  # needs triton, which CPU installations lack

        prefill = None
        if name == "flashinfer":
            prefill = FlashInferPrefill(spec, spec.dtype if dtype is None else dtype, device, deterministic)
            prefill.compile()
        return TritonAttention(spec, deterministic=deterministic, prefill=prefill)
    if name == "torch":
        return TorchAttention(spec, deterministic=deterministic)
    return TorchReference(spec)


def _by_measurement(setting: Setting) -> str:
    """Who prefills. The first start with FlashInfer compiles its kernels beside the engine, and the
    next one measures them."""
    from engine.attention.triton import TritonAttention

    try:
        refuse_unfit(setting.spec, setting.dtype, setting.deterministic)
    except Unsupported as refusal:
        print(f"attention: prefill by triton (not flashinfer: {refusal.message})", file=sys.stderr)
        return "triton"

    def with_flashinfer(spec: ModelSpec) -> AttentionBackend:
        part = FlashInferPrefill(spec, setting.dtype, setting.device)
        if not part.compiled():
            part.compile_in_background()
            raise Unsupported("its kernels are being compiled and will be measured at the next start")
        return TritonAttention(spec, prefill=part)

    choice = choose(setting, {"triton": TritonAttention, "flashinfer": with_flashinfer}, cache_folder() / "attention")
    torch.cuda.empty_cache()  # what the measurement used belongs to the key/value pool
    print(choice.describe(), file=sys.stderr)
    return choice.name
