"""The trace of an update: a graph of tensors alone, whose inputs are all that it reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fdg.adam import ALIGNMENT, Adam
from fdg.capture.arguments import NotCaptured, outline, rebuilt, written
from fdg.capture.watch import Branches, undone
from fdg.errors import UsageError
from fdg.update import detached, in_python, to_minimise

LIKE = ("randn_like", "rand_like", "randint_like", "empty_like", "zeros_like", "ones_like", "full_like", "new_")
"""Operations that only look at the shape of what they are given."""


class Trace:
    """A step as a graph whose inputs are: arguments that it reads, random draws, the optimizer's state, other tensors."""

    def __init__(self, step: Any, leaves: list[torch.Tensor]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        optimizer = self.optimizer = step.optimizer
        self.step = step
        state = [optimizer.flat, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps]
        optimizer._collect()
        with undone(state, step.loss_function):
            # Twice: what a loss function makes when first called (caches, lazy modules) is there in the second one.
            copies = rebuilt(step.template, iter([leaf.clone() for leaf in leaves]))
            in_python(optimizer, step.loss_function, copies)
            with torch.no_grad(), step.guard:
                try:
                    copies = [leaf.clone() for leaf in leaves], *[tensor.clone() for tensor in state], step.sizes
                    before = str(np.random.get_state()), random.getstate()
                    module = make_fx(lambda *inputs: self.whole(*inputs))(*copies)
                    if before != (str(np.random.get_state()), random.getstate()):
                        raise NotCaptured(
                            "it draws from numpy or random; draw from torch, or pass what is drawn as a tensor"
                        )
                except (NotCaptured, UsageError):
                    raise
                except Exception as error:
                    words = str(error).strip().splitlines()
                    raise NotCaptured(
                        f"it cannot be traced ({type(error).__name__}: {words[0] if words else ''})"
                    ) from None
        self.lift(module, len(leaves))

    def whole(
        self,
        leaves: list[torch.Tensor],
        flat: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        steps: torch.Tensor,
        sizes: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The step as it is traced."""
        step, optimizer = self.step, self.optimizer
        args = rebuilt(step.template, iter(leaves))
        branches = self.branches = Branches()
        with torch.enable_grad():
            with branches:
                result = step.loss_function(*args)
            loss = to_minimise(result, step.loss_function)
            found = torch.autograd.grad(loss, optimizer._parameters, allow_unused=True)
        parts = []
        for parameter, grad in zip(optimizer._parameters, found, strict=True):
            parts.append(torch.zeros_like(parameter).reshape(-1) if grad is None else grad.reshape(-1))
            if rest := -parameter.numel() % (ALIGNMENT // parameter.itemsize):
                parts.append(parameter.new_zeros(rest))
        grad = torch.cat(parts)
        group = optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        if group["max_grad_norm"] is not None:
            length = torch.linalg.vector_norm(grad)
            grad = grad * torch.clamp(group["max_grad_norm"] / (length + 1e-6), max=1.0)
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * flat
        count = steps + 1
        first = exp_avg + (grad - exp_avg) * (1 - beta1)
        second = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
        size, root = sizes.to(flat.dtype).unbind()
        new = flat - size * (first / (second.sqrt() / root + group["eps"]))
        outputs: list[torch.Tensor] = []
        if branches:
            same = branches.same()
            new, first = torch.where(same, new, flat), torch.where(same, first, exp_avg)
            second, count = torch.where(same, second, exp_avg_sq), torch.where(same, count, steps)
        flat.copy_(new), exp_avg.copy_(first), exp_avg_sq.copy_(second), steps.copy_(count)
        self.results = outline(detached(result), outputs)
        self.writes = []
        for path, key, tensor in written(args, step.template, iter(leaves)):
            self.writes.append((path, key, len(outputs)))
            outputs.append(tensor.detach())
        return [*outputs, same] if branches else outputs

    def lift(self, module: Any, count: int) -> None:
        """Make an input of every tensor that the trace holds: one that lies in the flat tensor, a part of that input."""
        graph = module.graph
        places = [node for node in graph.nodes if node.op == "placeholder"]
        given, flat = places[:count], places[count]
        memory = self.optimizer.flat.untyped_storage().data_ptr()
        self.constants: list[torch.Tensor] = []
        lifted: dict[int, Any] = {}
        last = places[-1]
        views = []
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            tensor = getattr(module, node.target)
            if id(tensor) not in lifted:
                if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                    raise NotCaptured(f"it uses a tensor on {tensor.device} of layout {tensor.layout}")
                if tensor.numel() and tensor.untyped_storage().data_ptr() == memory:
                    place = list(tensor.size()), list(tensor.stride()), tensor.storage_offset()
                    with graph.inserting_after(last):
                        lifted[id(tensor)] = graph.call_function(torch.ops.aten.as_strided.default, (flat, *place))
                    views.append(lifted[id(tensor)])
                else:
                    with graph.inserting_after(last):
                        last = lifted[id(tensor)] = graph.placeholder(f"constant_{len(self.constants)}")
                    self.constants.append(tensor.detach())
            node.replace_all_uses_with(lifted[id(tensor)])
            graph.erase_node(node)
        for view in views:
            last.append(view)
        graph.set_codegen(torch.fx.graph.CodeGen())
        graph.eliminate_dead_code()
        self.draws = draws_of(graph, flat)
        self.used = [index for index, node in enumerate(given) if node.users]
        for node in given:
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        self.module = torch.fx.GraphModule(torch.nn.Module(), graph)


def draws_of(graph: torch.fx.Graph, before: torch.fx.Node) -> Callable[[], Any]:
    """Take the draws of random numbers out of a graph: they become inputs, drawn as Python would, in the same order."""
    found = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if not found:
        return tuple
    apart, root = torch.fx.Graph(), torch.nn.Module()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            if node.op != "call_function":
                raise NotCaptured(
                    f"it draws random numbers that depend on data ({drawn.target}), which compiled code would do in another way: "
                    "draw standard ones (torch.randn, torch.rand) and compute from them, or draw in `learn` and pass them"
                )
            args = list(node.args)
            if str(node.target).removeprefix("aten.").startswith(LIKE) and isinstance(args[0], torch.fx.Node):
                like, name = args[0].meta["val"], f"like_{len(copies)}"  # only its shape counts
                root.register_buffer(name, torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
                args[0] = apart.get_attr(name)
                target: Any = node.target
                copies[node] = apart.call_function(target, tuple(args), dict(node.kwargs))
            else:
                copies[node] = apart.node_copy(node, copied)
        return copies[node]

    for drawn in found:
        copied(drawn)
        with graph.inserting_before(before):
            drawn.replace_all_uses_with(graph.placeholder(f"draw_{len(copies)}"))
    for drawn in reversed(found):
        graph.erase_node(drawn)
    graph.eliminate_dead_code()
    apart.output([copies[drawn] for drawn in found])
    return torch.fx.GraphModule(root, apart).forward


def adam_step(optimizer: Adam, flat: torch.Tensor, lr: float) -> torch.Tensor:
    """Where parameters go from `flat` with the moments that the optimizer has."""
    group, count = optimizer.param_groups[0], float(optimizer.steps)
    beta1, beta2 = group["betas"]
    root = (optimizer.exp_avg_sq.double() / (1 - beta2**count)).sqrt() + group["eps"]
    return flat - (lr / (1 - beta1**count)) * optimizer.exp_avg.double() / root
