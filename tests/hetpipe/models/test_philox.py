"""Philox 4x32-10: published vectors, the same bits by every kernel, and what dropout makes of them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetpipe.models import philox, philox_compiled, philox_torch

ONES = 0xFFFFFFFF
KNOWN = [  # Random123, tests/kat_vectors: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SAMPLES = (7, 8, 9, 2**40 + 3, 2**62 + 1)
KEY = 0x123456789ABCDEF


INTERPRETED = """
import sys
import torch
from hetpipe.models import philox_torch, philox_triton
cases = torch.load(sys.argv[1], weights_only=True)
found = [philox_triton.applied(x, philox_torch.draw(*key), num_blocks) for x, key, num_blocks in cases]
torch.save(found, sys.argv[1])
"""


def by_triton(cases, folder):
    """Return the results of the Triton kernel in the interpreter, which is chosen before Triton is loaded."""
    pytest.importorskip("triton")
    torch.save(cases, folder / "cases.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(folder / "cases.pt")]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    return torch.load(folder / "cases.pt", weights_only=True)


def expected(x, key):
    """Return what dropout is, by torch's whole numbers."""
    drawn = philox_torch.draw(*key)
    kept = philox_torch.words(drawn, x[0].numel(), CPU) <= drawn.last
    return torch.where(kept.view(x.shape), x.float() * torch.tensor(drawn.scale), 0.0).to(x.dtype)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_are_those_that_were_published(counter, key, words):
    assert [int(word) for word in philox_torch.rounds([torch.tensor(part) for part in counter], key)] == list(
        words
    )
    assert [int(word) for word in philox_compiled.words(counter, key)] == list(words)


@pytest.mark.parametrize("num_elements", [1, 3, 4, 1003])
def test_every_bit_of_a_mask_is_the_same_by_the_compiled_kernel_and_by_torch(num_elements):
    words = philox_torch.words(philox_torch.Draw(KEY, 5, SAMPLES, 0, 1.0), num_elements, CPU)
    for last in [0, ONES, *(int(word) - less for word in words.flatten()[:40] for less in (0, 1))]:
        drawn = philox_torch.Draw(KEY, 5, SAMPLES, last, 1.0)
        assert torch.equal(philox_compiled.kept(drawn, num_elements), words <= last)


@pytest.mark.slow
def test_a_million_elements_are_the_same_by_all_kernels(tmp_path):
    """Values of few bits are multiplied in float32 and rounded once."""
    cases = [(torch.randn(4, 2**18 - 1), (KEY, 0, [3, 4, 5, 9], 0.9), 2**14)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        cases.append((torch.randn(len(SAMPLES), 3, 67).to(dtype), (KEY, 3, list(SAMPLES), 0.7), 256))
    for (x, key, _), found in zip(cases, by_triton(cases, tmp_path), strict=True):
        right = expected(x, key)
        assert torch.equal(philox.dropped(x, philox_torch.draw(*key)), right)
        if x.dtype is torch.bfloat16:  # the interpreter cuts bits off, where devices round
            torch.testing.assert_close(found, right, rtol=2**-7, atol=0.0)
            assert torch.equal(found == 0, right == 0)
        else:
            assert torch.equal(found, right)


COMPILED = """
import itertools
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hetpipe.models.philox_triton import _apply
whole = dict.fromkeys(("sample", "call", "key", "last"), "i64")
targets = GPUTarget("cuda", 75, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
for target, dtype in itertools.product(targets, ("fp32", "fp16", "bf16")):
    signature = {"x": "*" + dtype, "out": "*" + dtype, "num_elements": "i32", **whole, "scale": "fp32"}
    source = ASTSource(_apply, {**signature, "num_blocks": "constexpr"}, {"num_blocks": 256})
    print(target.arch, dtype, len(compile(source, target=target).kernel) > 0)
"""


@pytest.mark.slow
def test_the_triton_kernel_compiles_for_gpus_of_both_makers(tmp_path):
    """The interpreter takes what the compiler refuses, such as an annotation that is no type of Triton."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [
        word
        for arch in ("75", "90", "gfx942")
        for dtype in ("fp32", "fp16", "bf16")
        for word in (arch, dtype, "True")
    ]


def test_float64_on_the_cpu_and_what_is_not_contiguous():
    x = torch.randn(6, len(SAMPLES), dtype=torch.float64).t()
    drawn = philox_torch.draw(KEY, 1, SAMPLES, 0.5)
    kept = philox_torch.words(drawn, 6, CPU) <= drawn.last
    assert torch.equal(philox.dropped(x, drawn), x * kept * 2.0)


@pytest.mark.parametrize("more", [0, 1])
def test_the_backward_draws_the_same_again_and_keeps_nothing_of_large_samples(more):
    num_elements = philox.KEPT_ELEMENTS + more
    x = torch.randn(len(SAMPLES), num_elements, requires_grad=True)
    drawn, gradient = philox_torch.draw(KEY, 1, SAMPLES, 0.6), torch.randn(len(SAMPLES), num_elements)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = philox.dropped(x, drawn)
    out.backward(gradient)
    assert torch.equal(out, philox.dropped(x.detach(), drawn))
    assert torch.equal(x.grad, philox.dropped(gradient, drawn))
    assert sum(tensor.numel() for tensor in saved) == (0 if more else x.numel())


def test_words_are_spread_evenly_and_draws_are_independent():
    n = 2**18
    words = philox_torch.words(philox_torch.draw(KEY, 0, (0, 1), 0.5), n, CPU)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift & 255).flatten(), minlength=256)
        expected = 2 * n / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)  # 255 degrees of freedom
    masks = [
        philox.kept(philox_torch.draw(key, call, (sample,), 0.9), n, CPU).double().flatten()
        for key, call, sample in ((1, 0, 0), (1, 0, 1), (2, 0, 0), (1, 0, 2**32), (1, 1, 0))
    ]
    for mask in masks:
        assert abs(float(mask.mean()) - 0.9) < 5 * math.sqrt(0.09 / n)
    correlations = torch.corrcoef(torch.stack([*masks, masks[0].roll(1)])) - torch.eye(6)
    assert correlations.abs().max() < 5 / math.sqrt(n)
