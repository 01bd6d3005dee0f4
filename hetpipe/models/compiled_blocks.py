"""Blocks compiled by torch.compile, each once for each shape, with the dropout of blocks that are not.

Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024. Only the forward of a block is compiled, inside of the gate around it, so names of
parameters stay, and cuts may be anywhere. The graph takes the key of a block's masks as one of its inputs and
has dropout as an operation that is opaque to the compiler, so neither steps nor samples compile it anew.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.philox import applied
from hetpipe.models.philox_torch import draw

RECOMPILE_LIMIT = 128
"""How often one forward may be compiled: by shapes, by kinds of blocks, with gradients and without."""


@torch.library.custom_op("hetpipe::keyed_dropout", mutates_args=())
def keyed_dropout(x: Tensor, key_and_samples: Tensor, call: int, keep_probability: float) -> Tensor:
    """Return x with elements dropped, as `philox.dropped` does.

    key_and_samples: [1 + samples], int64, on the CPU, so that the host can read it without waiting.
    """
    key, *samples = key_and_samples.tolist()
    dropped: Tensor = applied(x, draw(key, call, samples, keep_probability))
    return dropped


@keyed_dropout.register_fake
def _(x: Tensor, key_and_samples: Tensor, call: int, keep_probability: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: Tensor) -> None:
    _, key_and_samples, ctx.call, ctx.keep_probability = inputs
    ctx.save_for_backward(key_and_samples)


def _dropped_again(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (key_and_samples,) = ctx.saved_tensors
    return keyed_dropout(gradient, key_and_samples, ctx.call, ctx.keep_probability), None, None, None


keyed_dropout.register_autograd(_dropped_again, setup_context=_keep)


def compiled(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the forward of a block compiled as one graph, anew for each shape.

    What follows calls of torch, as `KeyedDropout` in a layer's first forward or a counter of bytes, has the
    forward as it is: a graph would hide them.
    name: of the block, for errors: InputError if it cannot be compiled.
    """
    # what is compiled is asked for its gradient, though it may be what the block before gave
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._inductor.config.compile_threads = 1  # a rank starts no processes of its own
    graph = torch.compile(forward, fullgraph=True, dynamic=False)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return forward(*args, **kwargs)
        try:
            return graph(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
            raise InputError(f"{name} cannot be compiled ({reason}); leave out --compile") from error

    return compute


def check_compilable(block: nn.Module, name: str) -> None:
    """Check that a block computes with its weights as they are held.

    Raises: InputError if it casts or dequantizes some of them for each operation, which would be kept.
    """
    for inner, module in block.named_modules():
        if module is not block and "forward" in module.__dict__:
            raise InputError(
                f"{name}.{inner} holds frozen weights in other bytes than it computes in, which a compiled "
                "block would keep in both; leave out --compile, or --load-in, or give --dtype bf16"
            )
