"""From a torch.nn.Module to a graph of operations: trace with torch.fx, then translate node by node.

Whatever does not depend on the input is evaluated; whatever does must have a rule (rules.py), or the translation stops
with an error that names the layer. Nothing is guessed.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from holdfast.allocator import reuse_blocks
from holdfast.bounds import ops
from holdfast.bounds.ops import Graph, Node, Op, evaluate
from holdfast.bounds.rules import (
    ADD,
    ADVICE,
    BATCH,
    CONCATENATE,
    DIVIDE,
    FUNCTIONS,
    MULTIPLY,
    SIMPLE,
    SUBTRACT,
    affine,
    batch_norm_of,
    from_module,
)
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax


def trace(model: nn.Module, x: Tensor) -> Graph:
    """The graph of `model` for inputs like x (B, ...).

    Weights are referenced, not copied; batch norm and constants are folded, so trace anew once they change.

    Raises:
        UnsupportedError: the model cannot be traced, or holds a layer without a rule; the message names it.
    """
    reuse_blocks()
    example = x[:1].detach().expand(BATCH, *x.shape[1:]).clone()
    with torch.enable_grad():  # batch norm is folded here, and must keep its gradient
        graph, _ = Translator(_traced(model)).translate(example)
    with torch.no_grad():
        ours, theirs = graph.forward(example), model(example)
    scale = theirs.abs().max().clamp(min=1e-6)
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=0, atol=float(1e-3 * scale)):
        raise UnsupportedError(
            "the translated graph does not reproduce the model's output: the model does something that tracing does "
            "not see (hooks, control flow on attributes, randomness). Export it to ONNX and load that."
        )
    return graph


def trace_batch(model: nn.Module, x: Tensor, *, use_logits: bool = True, unroll: bool = False) -> tuple[Graph, Tensor]:
    """The graph of `model` as it is on this batch, and the logits of the batch, both with gradients: for training.

    Translating evaluates the network on x, so the logits come for free. Batch norm in training mode is folded with the
    mean and variance of this batch, through which gradients flow, and updates its running statistics. Neither the
    values nor the model are checked: call `trace` once before.

    Args:
        model: from (B, ...) to logits (B, K), in training or eval mode.
        x: inputs (B, ...).
        use_logits: False if no loss looks at the logits: they then come without gradients, where the graph allows it.
        unroll: True for a domain that knows `ops.Unroll`, which is used where it saves time.
    """
    if model not in _TRACED:
        reuse_blocks()
        _TRACED[model] = _traced(model)
    # The operations hold the weights, with their gradients; only batch norm in training is computed from what came
    # before it.
    needed = use_logits or any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and m.training for m in model.modules())
    return Translator(_TRACED[model], batch=True, gradients=needed, unroll=unroll).translate(x)


_TRACED: WeakKeyDictionary[nn.Module, fx.GraphModule] = WeakKeyDictionary()
"""Tracing costs as much as a small step of training. The traced modules refer to the parameters of the model."""


def _traced(model: nn.Module) -> fx.GraphModule:
    try:
        return fx.GraphModule(model, _Tracer().trace(model))
    except Exception as error:
        raise UnsupportedError(
            f"the model cannot be traced by torch.fx: {str(error).splitlines()[0]} Avoid control flow that depends on "
            "values in forward(), or export the model to ONNX and load that."
        ) from error


_PLAIN = ("torch.nn", "orthogonium", "deel.torchlip")
"""Packages whose linear layers and convolutions do what those of torch do with the weight that they compute."""


class _Tracer(fx.Tracer):
    """Looks into every module but those that have a rule of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_parametrized(m) and not type(m).__mro__[1].__module__.startswith(_PLAIN):
            return False  # the class behind the parametrisation may have a forward() of its own
        return isinstance(m, MinMax) or super().is_leaf_module(m, module_qualified_name)


class Symbol:
    """A value that depends on the input: which node it is, and an example of it (BATCH, *shape)."""

    def __init__(self, index: int, example: Tensor) -> None:
        self.index, self.example = index, example


class Translator(fx.Interpreter):
    """Walks a traced module with example values and collects operations for all that depends on the input.

    With `batch` the examples are a real batch, whose statistics batch norm in training mode takes; with `gradients`
    they carry gradients; with `unroll`, maps may be flattened in their order in memory.
    """

    def __init__(
        self, traced: fx.GraphModule, *, batch: bool = False, gradients: bool = False, unroll: bool = False
    ) -> None:
        super().__init__(traced, garbage_collect_values=False)
        self.batch, self.gradients, self.unroll = batch, gradients, unroll
        self.extra_traceback = False  # our own message names the layer
        self.nodes: list[Node] = []
        self.current = "input"
        self.users: list[Any] = []  # the modules that take the value of the current node

    def translate(self, example: Tensor) -> tuple[Graph, Tensor]:
        """The graph for inputs like `example` (BATCH, ...), and their logits."""
        output = self.run(example)
        if not isinstance(output, Symbol):
            raise UnsupportedError("the model's output does not depend on its input, or is not a single tensor")
        # Nodes that the output does not need stay in the list harmlessly, but the output must come last.
        if output.index != len(self.nodes) - 1:
            self._emit(ops.Reshape(tuple(output.example.shape[1:])), (output,))
        return Graph(tuple(self.nodes)), output.example

    def run_node(self, n: fx.Node) -> Any:
        self.current = str(n.target) if n.op == "call_module" else n.name
        if self.unroll:
            self.users = [self.fetch_attr(str(user.target)) if user.op == "call_module" else None for user in n.users]
        try:
            return super().run_node(n)
        except UnsupportedError as error:
            if "layer '" in str(error):
                raise
            raise UnsupportedError(f"layer '{self.current}': {error}") from error

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        example = super().placeholder(target, args, kwargs)
        if self.nodes:
            raise UnsupportedError("the model takes more than one input")
        self.nodes.append(Node(ops.Input(), (), "input", tuple(example.shape[1:])))
        return Symbol(0, example)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if not any(isinstance(a, Symbol) for a in args):
            return super().call_module(target, args, kwargs)
        if self.batch and module.training and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            return self._emit(batch_norm_of(module, args[0].example), args[:1])
        op, before = from_module(module, args[0].example), self.nodes[args[0].index].op
        if isinstance(op, ops.Linear) and isinstance(before, ops.Unroll):
            op = ops.Linear(before.reorder(op.weight), op.bias)
        return self._emit(op, args[:1])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(target, args, kwargs, super().call_function)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(target, args, kwargs, super().call_method)

    def _call(self, target: Any, args: Any, kwargs: Any, fallback: Callable[..., Any]) -> Any:
        if target in CONCATENATE:
            return self._concatenate(*args, **kwargs)
        symbols = [a for a in (*args, *kwargs.values()) if isinstance(a, Symbol)]
        if not symbols:
            return fallback(target, args, kwargs)
        first = symbols[0]
        if target is getattr or target in ("size", "dim"):
            return fallback(target, tuple(a.example if isinstance(a, Symbol) else a for a in args), kwargs)
        if target in ADD | SUBTRACT | MULTIPLY | DIVIDE and len(args) == 2 and not kwargs:
            return self._arithmetic(target, args[0], args[1])
        if target in SIMPLE:
            return self._emit(SIMPLE[target](), (first,))
        if target in FUNCTIONS and isinstance(args[0], Symbol) and len(symbols) == 1:
            return self._emit(FUNCTIONS[target](args[0].example, *args[1:], **kwargs), (first,))
        raise UnsupportedError(f"no rule for the operation '{getattr(target, '__name__', target)}'. {ADVICE}")

    def _arithmetic(self, target: Any, a: Any, b: Any) -> Symbol:
        if isinstance(a, Symbol) and isinstance(b, Symbol):
            if target in SUBTRACT:
                b = self._emit(affine(b.example, -1.0, 0.0), (b,))
            elif target not in ADD:
                raise UnsupportedError(f"a product or quotient of two values that both depend on the input. {ADVICE}")
            if a.example.shape != b.example.shape:
                raise UnsupportedError("an addition of two layers of different shapes")
            return self._emit(ops.Add(), (a, b))
        x, value = (a, b) if isinstance(a, Symbol) else (b, a)
        if target in ADD:
            op = affine(x.example, 1.0, value)
        elif target in SUBTRACT:
            op = affine(x.example, 1.0, -value) if x is a else affine(x.example, -1.0, value)
        elif target in MULTIPLY:
            op = affine(x.example, value, 0.0)
        elif x is a:
            op = affine(x.example, 1.0 / value, 0.0)
        else:
            raise UnsupportedError(f"a division by a value that depends on the input. {ADVICE}")
        return self._emit(op, (x,))

    def _concatenate(self, tensors: Any, dim: int = 0) -> Any:
        if not all(isinstance(t, Symbol) for t in tensors):
            raise UnsupportedError("a concatenation with a constant")
        dim = dim % tensors[0].example.ndim
        if dim == 0:
            raise UnsupportedError("a concatenation along the batch axis")
        return self._emit(ops.Concat(dim), tuple(tensors))

    def _emit(self, op: Op | None, inputs: tuple[Symbol, ...]) -> Symbol:
        if op is None:
            return inputs[0]
        if self.unroll and isinstance(op, ops.Reshape):
            op = self._in_memory_order(op, inputs[0].example)
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            example = evaluate(op, [s.example for s in inputs])
        self.nodes.append(Node(op, tuple(s.index for s in inputs), self.current, tuple(example.shape[1:])))
        return Symbol(len(self.nodes) - 1, example)

    def _in_memory_order(self, op: ops.Reshape, x: Tensor) -> Op:
        """Unroll, if it takes less to reorder the weights of the layers behind than three maps, there and back."""
        last = x.ndim == 4 and len(op.shape) == 1 and x.stride(1) == 1 < x.shape[1]
        dense = [user for user in self.users if isinstance(user, nn.Linear)]
        if not last or len(dense) < len(self.users) or sum(user.out_features for user in dense) > 2 * len(x):
            return op
        return ops.Unroll((x.shape[1], x.shape[2], x.shape[3]))
