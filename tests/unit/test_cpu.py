"""Attention on a CPU machine, and what a configuration becomes there."""

import dataclasses
import gc
import importlib

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
    get_sliding_window_mask_mod,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from monarch_titan import upstream
from monarch_titan.training import cpu
from monarch_titan.training.cpu import GptOssExperts, SdpaAttention, SdpaVarlenAttention, adapt

BATCH, LENGTH = 2, 24

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def packed_mask(seed=0, window=LENGTH):
    """Causal, and within documents that end at other places in each sample; the documents, too."""
    documents = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(seed)).lt(0.2).cumsum(1)
    near = get_sliding_window_mask_mod(window)

    def same_document(b, h, q, kv):
        return near(b, h, q, kv) & (documents[b, q] == documents[b, kv])

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


def plain_attention(q, k, v, mask, scale):
    """One query at a time: outputs, and the logarithm of the sum over the keys that it sees."""
    out, lse = torch.empty(*q.shape[:3], v.shape[-1]), torch.empty(q.shape[:3])
    for b, i, n in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        head = n * k.shape[2] // q.shape[2]
        seen = [j for j in range(k.shape[1]) if mask.mask_mod(*map(torch.tensor, (b, n, i, j)))]
        weights = torch.exp(k[b, seen, head] @ q[b, i, n] * scale)
        out[b, i, n] = weights @ v[b, seen, head] / weights.sum()
        lse[b, i, n] = weights.sum().log()
    return out, lse


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [LENGTH, 3])
def test_transform_is_given_output_and_log_sum_exp(kv_heads, window):
    mask, _ = packed_mask(window=window)
    q, k, v = inputs(kv_heads=kv_heads)
    options = {"attention_masks": mask, "scale": 0.4, "enable_gqa": kv_heads < 4}
    out, lse = attention()(q, k, v, out_transform=lambda *given: given, **options)
    expected_out, expected_lse = plain_attention(q, k, v, mask, scale=0.4)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attention()(q, k, v, **options), expected_out, rtol=1e-5, atol=1e-5)
    flex = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, scale=0.4, enable_gqa=kv_heads < 4,
        return_aux=AuxRequest(lse=True),
    )[1].lse.transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(lse, flex, rtol=1e-5, atol=1e-5)


def test_gradient_of_attention_sinks():
    """A sink is a key that each query of its head sees, with a score of its own and no value."""
    mask, _ = packed_mask(window=5)
    q, k, v = (x.requires_grad_() for x in inputs())
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0], requires_grad=True)

    def rescale(out, lse):
        return out * torch.sigmoid(lse - sinks).unsqueeze(-1)

    weight = torch.randn(BATCH, LENGTH, 4, 8, generator=torch.Generator().manual_seed(1))
    (attention()(q, k, v, attention_masks=mask, out_transform=rescale) * weight).sum().backward()
    gradients = [x.grad for x in (q, k, v, sinks)]

    visible = cpu.create_mask(mask.mask_mod, BATCH, 1, LENGTH, LENGTH, device="cpu")
    again = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
    q, k, v, sinks = again
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * 8**-0.5
    scores = torch.cat(
        [scores.masked_fill(~visible, -torch.inf), sinks.view(1, 4, 1, 1).expand(BATCH, 4, LENGTH, 1)], -1
    )
    out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1)[..., :-1], v)
    (out * weight).sum().backward()
    for gradient, expected in zip(gradients, again, strict=True):
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [LENGTH, 4, 1])
@pytest.mark.parametrize("sinks", [False, True])
def test_varlen_equals_flex_attention(window, sinks):
    mask, documents = packed_mask(window=window)
    first = torch.ones(BATCH, 1, dtype=torch.bool)
    positions = (~torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1)).long()  # 0 where a document begins
    metadata = create_varlen_metadata_for_document(positions)
    varlen = SdpaVarlenAttention(SdpaVarlenAttention.Config(window_size=(window - 1, 0)))
    q, k, v = inputs(kv_heads=2)
    options = {"scale": 0.3, "enable_gqa": True}
    if sinks:
        options["out_transform"] = lambda out, lse: out * torch.sigmoid(lse).unsqueeze(-1)
    expected = attention()(q, k, v, attention_masks=mask, **options)
    torch.testing.assert_close(varlen(q, k, v, attention_masks=metadata, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "seen"), [((-1, 0), "causal"), ((-1, -1), "all"), ((1, 2), "band")])
def test_varlen_window_counts_to_both_sides(window, seen):
    positions = torch.arange(6).unsqueeze(0)
    varlen = SdpaVarlenAttention(SdpaVarlenAttention.Config(window_size=window))
    q = torch.zeros(1, 6, 1, 6)
    out = varlen(q, q, torch.eye(6).view(1, 6, 1, 6), attention_masks=create_varlen_metadata_for_document(positions))
    back = torch.arange(6).unsqueeze(1) - torch.arange(6)
    expected = {"causal": back >= 0, "all": back == back, "band": (back <= 1) & (back >= -2)}[seen]
    assert torch.equal(out.view(6, 6) > 0, expected)


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
    masks = [packed_mask()[0], packed_mask(window=3)[0]]  # models with sliding windows take turns
    for mask in masks * 3:
        attention()(*inputs(), attention_masks=mask)
    assert len(made) == 2


def test_dense_masks_go_with_their_block_masks():
    mask, _ = packed_mask()
    attention()(*inputs(), attention_masks=mask)
    before = len(SdpaAttention._dense)
    del mask
    gc.collect()
    assert len(SdpaAttention._dense) < before


@pytest.mark.parametrize("option", ["score_mod", "an_option_of_tomorrow"])
def test_an_option_without_equivalent_is_refused(option):
    mask, _ = packed_mask()
    with pytest.raises(NotImplementedError, match=f"attention on CPU does not support {option}"):
        attention()(*inputs(), attention_masks=mask, **{option: lambda *args: args[0]})
    attention()(*inputs(), attention_masks=mask, **{option: None})


# Configuration


def debug_config(module, name=""):
    registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
    return getattr(registry, name or f"{module}_debugmodel")()


MODELS = {
    "llama3_debugmodel": "llama3",
    "llama3_debugmodel_varlen_attn": "llama3",
    "deepseek_v3_debugmodel": "deepseek_v3",
    "qwen3_debugmodel": "qwen3",
    "qwen3_moe_debug": "qwen3",
    "gpt_oss_debugmodel": "gpt_oss",
    "gpt_oss_debugmodel_flex": "gpt_oss",
}
SWAPPED = {FlexAttention: SdpaAttention, VarlenAttention: SdpaVarlenAttention, GptOssGroupedExperts: GptOssExperts}


@pytest.mark.parametrize("name", MODELS)
def test_overrides_swap_what_needs_a_gpu(name, monkeypatch):
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    config = debug_config(MODELS[name], name)

    def found():
        return [(fqn, part) for kind in SWAPPED for fqn, part, *_ in config.model_spec.traverse(kind.Config)]

    before = found()
    assert before
    adapt(config)
    apply_overrides(config.override, config)
    after = found()
    assert [fqn for fqn, _ in after] == [fqn for fqn, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        expected = {kind.Config: ours for kind, ours in SWAPPED.items()}[type(old)]
        assert type(new) is expected.Config
        common = {field.name for field in dataclasses.fields(old)}
        assert {n: getattr(new, n) for n in common} == {n: getattr(old, n) for n in common}
    assert isinstance(after[0][1].build(), tuple(SWAPPED.values()))


def test_gpt_oss_windows_are_the_same_for_flex_and_varlen():
    layers = debug_config("gpt_oss", "gpt_oss_debugmodel").model_spec.model.layers
    windows = [layer.attention.inner_attention.window_size[0] for layer in layers]
    assert windows == [(layer.attention.sliding_window_size or 0) - 1 for layer in layers]
    assert len(set(windows)) == 2


def test_experts_keep_the_dtype_of_their_input():
    config = GptOssExperts.Config(dim=16, hidden_dim=16, num_experts=2)
    experts = GptOssExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(6, 16, generator=generator, requires_grad=True)
    counts = torch.tensor([2, 4])
    out = experts(x, counts)
    assert out.dtype == torch.float32
    assert torch.equal(out, GptOssGroupedExperts.forward(experts, x, counts).float())
    out.sum().backward()
    assert x.grad.dtype == torch.float32


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
    assert config.override.imports == [*cpu.OVERRIDES]
    assert config.training.disable_cuda_graphs
    assert config.training.mixed_precision_param == "float32"
    assert config.parallelism.spmd_backend == untouched.parallelism.spmd_backend


def test_overrides_of_the_user_are_kept(monkeypatch):
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    config = debug_config("llama3")
    config.override.imports = ["my_package.my_override"]
    adapt(config)
    assert config.override.imports == ["my_package.my_override", *cpu.OVERRIDES]


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
