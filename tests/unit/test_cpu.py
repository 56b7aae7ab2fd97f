"""Attention on a CPU machine, and what a configuration becomes there."""

import dataclasses
import importlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import FlexAttention

from monarch_titan import upstream
from monarch_titan.training import cpu
from monarch_titan.training.cpu import SDPA_OVERRIDE, SdpaAttention, adapt

BATCH, LENGTH = 2, 24

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def packed_mask(seed=0):
    """Causal, and within documents that end at other places in each sample; the documents, too."""
    documents = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(seed)).lt(0.2).cumsum(1)

    def same_document(b, h, q, kv):
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return create_block_mask(same_document, BATCH, None, LENGTH, LENGTH, device="cpu"), documents


def inputs(heads=4, kv_heads=4, size=8, value_size=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    return [torch.randn(BATCH, LENGTH, n, h, generator=generator, dtype=dtype) for n, h in shapes]


def attention():
    return SdpaAttention(SdpaAttention.Config())


def reference(q, k, v, mask, **options):
    """Eager FlexAttention in TorchTitan's layout."""
    return flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, **options).transpose(1, 2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"kv_heads": 2}, {"enable_gqa": True}),
        ({"kv_heads": 1}, {"enable_gqa": True, "scale": 0.5}),
        ({}, {"scale": 0.05}),
        ({"size": 12, "value_size": 8}, {"scale": 0.3}),  # multi-head latent attention
    ],
)
def test_equals_flex_attention_on_packed_documents(shape, options):
    mask, _ = packed_mask()
    q, k, v = inputs(**shape)
    out = attention()(q, k, v, attention_masks=mask, **options)
    torch.testing.assert_close(out, reference(q, k, v, mask, **options), rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_own_document_only():
    mask, documents = packed_mask()
    q, k, v = (x.requires_grad_() for x in inputs())
    first = documents == documents[:, :1]
    attention()(q, k, v, attention_masks=mask)[first].square().sum().backward()
    for x in (q, k, v):
        assert x.grad[first].abs().sum() > 0
        assert x.grad[~first].abs().sum() == 0


def test_result_has_the_dtype_of_the_query():
    mask, _ = packed_mask()
    out = attention()(*inputs(dtype=torch.bfloat16), attention_masks=mask)
    assert (out.dtype, out.shape) == (torch.bfloat16, (BATCH, LENGTH, 4, 8))


def test_other_documents_have_no_influence():
    mask, documents = packed_mask()
    q, k, v = inputs()
    before = attention()(q, k, v, attention_masks=mask)
    last = documents == documents[:, -1:]
    k[last], v[last] = 100.0, 100.0
    after = attention()(q, k, v, attention_masks=mask)
    assert torch.equal(before[~last], after[~last])
    assert not torch.allclose(before[last], after[last])


def test_a_new_mask_replaces_the_shared_one():
    q, k, v = inputs()
    for seed in (0, 1, 0):
        mask, _ = packed_mask(seed)
        torch.testing.assert_close(
            attention()(q, k, v, attention_masks=mask), reference(q, k, v, mask), rtol=1e-5, atol=1e-5
        )


def test_layers_share_one_dense_mask(monkeypatch):
    made = []
    create = cpu.create_mask
    monkeypatch.setattr(cpu, "create_mask", lambda *args, **kwargs: made.append(1) or create(*args, **kwargs))
    mask, _ = packed_mask()
    for _ in range(3):
        attention()(*inputs(), attention_masks=mask)
    assert len(made) == 1


@pytest.mark.parametrize("option", ["score_mod", "out_transform", "an_option_of_tomorrow"])
def test_an_option_without_equivalent_is_refused(option):
    mask, _ = packed_mask()
    with pytest.raises(NotImplementedError, match=f"attention on CPU does not support {option}"):
        attention()(*inputs(), attention_masks=mask, **{option: lambda *args: args[0]})
    attention()(*inputs(), attention_masks=mask, **{option: None})


# Configuration


def debug_config(module):
    registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
    return getattr(registry, f"{module}_debugmodel")()


@pytest.mark.parametrize("module", ["llama3", "deepseek_v3"])
def test_override_swaps_every_flex_attention(module, monkeypatch):
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    config = debug_config(module)
    before = [found for _, found, *_ in config.model_spec.traverse(FlexAttention.Config)]
    assert before and all(type(found) is FlexAttention.Config for found in before)
    adapt(config)
    replacements = apply_overrides(config.override, config)
    after = [found for _, found, *_ in config.model_spec.traverse(FlexAttention.Config)]
    assert len(replacements) == len(after) == len(before)
    assert all(type(found) is SdpaAttention.Config for found in after)
    assert all(isinstance(found.build(), SdpaAttention) for found in after[:1])


@pytest.mark.parametrize("accelerator", [None, "cuda"])
def test_adapting_twice_is_adapting_once(monkeypatch, accelerator):
    monkeypatch.setattr(upstream, "accelerator", lambda: accelerator)
    config = debug_config("llama3")
    adapt(config)
    parts = [config.override, config.parallelism, config.training]
    once = [dataclasses.asdict(part) for part in parts]
    adapt(config)
    assert [dataclasses.asdict(part) for part in parts] == once


def test_only_a_cpu_machine_changes_attention_and_precision(monkeypatch):
    config, untouched = debug_config("llama3"), debug_config("llama3")
    monkeypatch.setattr(upstream, "accelerator", lambda: "cuda")
    monkeypatch.setattr(upstream, "spmd_backend_needs_dtensor", lambda: False)
    adapt(config)
    for part in ("override", "training", "parallelism"):
        assert getattr(config, part) == getattr(untouched, part)

    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    adapt(config)
    assert config.override.imports == [SDPA_OVERRIDE]
    assert config.training.disable_cuda_graphs
    assert config.training.mixed_precision_param == "float32"
    assert config.parallelism.spmd_backend == untouched.parallelism.spmd_backend


def test_overrides_of_the_user_are_kept(monkeypatch):
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    config = debug_config("llama3")
    config.override.imports = ["my_package.my_override"]
    adapt(config)
    assert config.override.imports == ["my_package.my_override", SDPA_OVERRIDE]


def test_spmd_backend_follows_the_version_of_torch(monkeypatch):
    monkeypatch.setattr(upstream, "spmd_backend_needs_dtensor", lambda: True)
    config = debug_config("llama3")
    adapt(config)
    assert config.parallelism.spmd_backend == "partial_dtensor"


def test_fsdp_modules_reduce_by_a_sum(monkeypatch):
    class Sharded(torch.nn.Module):
        forced = False

        def set_force_sum_reduction_for_comms(self, enable):
            self.forced = enable

    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", Sharded)
    inner, outer = Sharded(), Sharded()
    outer.layers = torch.nn.Sequential(torch.nn.Linear(1, 1), inner)
    cpu.use_sum_reductions(outer)
    assert inner.forced and outer.forced
