"""What a model may not do, since ranks that hold parts of it would do it otherwise, or not at all."""

from torch import nn

from cost_model.errors import InputError


def refuse_uncuttable(model: nn.Module) -> None:
    """Refuse what a plan would leave out or change without a word.

    Raises: InputError for an nn.Sequential with a forward or hooks of its own, of which the layers alone are
    run; for gradient hooks of parameters, which ranks do not have; for embeddings that write their weights
    in forward, or whose gradients are sparse or depend on the microbatch.
    """
    if isinstance(model, nn.Sequential):
        _refuse_own_forward(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"parameter {name!r} has a gradient hook, which the ranks that train it do not have; change "
                "the gradient in a torch.autograd.Function inside of its module"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _refuse_embedding(name, module)


def _refuse_own_forward(model: nn.Sequential) -> None:
    kind = type(model).__name__
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
        raise InputError(
            f"{kind} is an nn.Sequential with a forward of its own, of which each layer would be run alone; "
            "put what it does besides into its layers"
        )
    hooks = model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks
    if any(hooks):
        raise InputError(
            f"the {kind} has a hook of its own, and each of its layers would be run alone; give the hook to "
            "its first or last layer"
        )


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if not module.weight.requires_grad:
        return
    if module.max_norm is not None:
        raise InputError(
            f"layer {name!r} has max_norm={module.max_norm:g}, with which a forward changes its weights; "
            "leave it out"
        )
    if module.sparse:
        raise InputError(f"layer {name!r} has sparse gradients, which are not added up; give sparse=False")
    if module.scale_grad_by_freq:
        raise InputError(
            f"layer {name!r} has scale_grad_by_freq, with which gradients depend on the microbatch; leave it "
            "out"
        )
