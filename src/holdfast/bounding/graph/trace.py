"""From a torch.nn.Module to a graph of operations: trace with torch.fx, then translate node by node.

Whatever does not depend on the input is evaluated; whatever does must have a rule (rules.py), or the translation stops
with an error that names the layer. Nothing is guessed.
"""

import copy
import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.agreement import check_agreement, check_plain, check_unchanged, state_of
from holdfast.bounding.graph.once import once_of
from holdfast.bounding.graph.ops import Graph, Node, Op, evaluate
from holdfast.bounding.graph.rules import (
    ADD,
    ADVICE,
    BATCH,
    CONCATENATE,
    COPY,
    DIVIDE,
    FUNCTIONS,
    IN_PLACE,
    MULTIPLY,
    SIMPLE,
    SUBTRACT,
    affine,
    batch_norm_of,
    from_module,
)
from holdfast.checks import CLONE
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax
from holdfast.threats import Threat
from holdfast.utils.allocator import reuse_blocks
from holdfast.utils.reference import is_reference


def trace(model: nn.Module, x: Tensor, threat: Threat | None = None) -> Graph:
    """Translate `model` into a graph for inputs like x (B, ...), and check that the graph is the model.

    Both are compared on every input, at random points of the threat set, and at batch size one (agreement.py); inside
    `trace_once`, once. Weights are referenced, not copied; batch norm and constants are folded, so trace anew once they
    change.

    Raises:
        UnsupportedError: the model cannot be traced, holds a layer without a rule, or does what a graph cannot say
            (hooks, random numbers, a state that calls change); the message names it.
    """
    reuse_blocks()
    check_plain(model)
    once = once_of(model)
    if once is None:
        return _compared(_translated(model, x), model, x, threat)
    kind, keys = (tuple(x.shape[1:]), x.dtype, x.device), once.keys(x, threat)
    graph = once.graphs[kind] if kind in once.graphs else _translated(model, x)
    new = torch.tensor([key not in once.compared for key in keys], device=x.device)
    if bool(new.all()):
        _compared(graph, model, x, threat, once.logits_of(x))
    elif bool(new.any()):
        _compared(graph, model, x[new], None if threat is None else threat.select(new), once.logits_of(x[new]))
    once.graphs[kind] = graph
    once.compared.update(keys)
    return graph


def _compared(graph: Graph, model: nn.Module, x: Tensor, threat: Threat | None, logits: Tensor | None = None) -> Graph:
    """The graph, if it is the model; `logits` (B, K) is what the model returned for x, if that is known."""
    before = state_of(model)
    check_agreement(graph, model, x, threat, cache(lambda: _in_double(model, x)), logits)
    check_unchanged(model, before)
    return graph


def _translated(model: nn.Module, x: Tensor) -> Graph:
    example = x[:1].detach().expand(BATCH, *x.shape[1:]).clone()
    with torch.enable_grad():  # batch norm is folded here, and must keep its gradient
        return Translator(_traced(model)).translate(example)[0]


def _in_double(model: nn.Module, x: Tensor) -> tuple[Graph, nn.Module] | None:
    """Graph and model in float64; None for a model that torch does not copy, or that runs only in its own dtype."""
    try:
        double = copy.deepcopy(model).double()
        double(x[:1].detach().double())  # hooks of torch.nn.utils compute their weights anew
        return _translated(double, x.double()), double
    except RuntimeError:
        return None


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
    return Translator(_TRACED[model], batch=True, gradients=needed, unroll=unroll and not is_reference()).translate(x)


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
"""Packages whose linear layers and convolutions do what the layers of torch do with the weight that they compute."""


class _Tracer(fx.Tracer):
    """Look into every module but the ones that have a rule of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_parametrized(m) and not type(m).__mro__[1].__module__.startswith(_PLAIN):
            return False  # the class behind the parametrisation may have a forward() of its own
        return isinstance(m, MinMax) or super().is_leaf_module(m, module_qualified_name)


class Memory:
    """The values that may share one block of memory: a tensor and its views."""

    def __init__(self) -> None:
        self.values: list[Symbol] = []
        self.copied = False  # whether one of the values may also be a copy, which an in-place operation leaves alone


class Symbol:
    """A value that depends on the input: which node it is, and an example of it (BATCH, *shape).

    An in-place operation gives the symbol another node; every other view of the same memory becomes stale.
    """

    def __init__(self, index: int, example: Tensor, memory: Memory) -> None:
        self.index, self.example, self.memory = index, example, memory
        self.stale = ""  # the layer that overwrote it, if any
        memory.values.append(self)


class BatchSize(int):
    """The size of the example batch: may be used to reshape, not to compute with."""

    def refuse(self, *_: Any) -> Any:
        """Every arithmetic operation ends here."""
        raise UnsupportedError("arithmetic with the batch size: the answer for an input would depend on its batch")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = refuse


_ATTRIBUTES = ("shape", "ndim", "dtype", "device")
"""What may be read off a value while the graph is built: the same for every input."""


def _writes(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function or method changes its first argument in memory."""
    if isinstance(target, str):
        return target.endswith("_") and not target.endswith("__")
    if target in IN_PLACE:
        return True
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
    except (TypeError, ValueError):  # built-in functions have no signature, and no such argument
        return False
    return bool(bound.arguments.get("inplace", False))


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
        self.given = Memory()  # of the input, which belongs to the caller

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
            raise UnsupportedError(f"layer '{self.current}': {self._transformer()}{error}") from error

    def _transformer(self) -> str:
        """What to say first of a model with attention, whose first layer without a rule may be a mere transpose."""
        graph = self.module.graph
        assert isinstance(graph, fx.Graph)
        called = [self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target for n in graph.nodes]
        attends = any(t is F.scaled_dot_product_attention or isinstance(t, nn.MultiheadAttention) for t in called)
        return "part of a transformer, whose attention has no bounds; " if attends else ""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        example = super().placeholder(target, args, kwargs)
        if self.nodes:
            raise UnsupportedError("the model takes more than one input")
        self.nodes.append(Node(ops.Input(), (), "input", tuple(example.shape[1:])))
        self.given = Memory()
        return Symbol(0, example, self.given)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if not any(isinstance(a, Symbol) for a in (*args, *kwargs.values())):
            return super().call_module(target, args, kwargs)
        if kwargs or len(args) != 1:
            raise UnsupportedError(f"no rule for the layer type {type(module).__name__} with several arguments")
        if self.batch and module.training and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            return self._emit(batch_norm_of(module, args[0].example), args[:1])
        op, before = from_module(module, args[0].example), self.nodes[args[0].index].op
        if isinstance(op, ops.Linear) and isinstance(before, ops.Unroll):
            op = ops.Linear(before.reorder(op.weight), op.bias)
        result = self._emit(op, args[:1])
        return self._write(args[0], result) if getattr(module, "inplace", False) else result

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
        if target is getattr or target in ("size", "dim"):
            return self._property(target, *args, **kwargs)
        result = self._operation(target, args, kwargs, symbols)
        if not _writes(target, args, kwargs):
            return result
        if not isinstance(args[0], Symbol):
            if isinstance(args[0], Tensor):
                raise UnsupportedError("an operation that writes into a constant or parameter of the model")
            return result
        return self._write(args[0], result)

    def _property(self, target: Any, value: Symbol, *args: Any) -> Any:
        """What the model reads off a value other than its numbers; the batch size is good only for reshapes."""
        if target is getattr and args[0] not in _ATTRIBUTES:
            raise UnsupportedError(f"the attribute '{args[0]}' of a value that depends on the input. {ADVICE}")
        example = value.example
        shape = (BatchSize(example.shape[0]), *example.shape[1:])
        if target is getattr:
            return shape if args[0] == "shape" else getattr(example, args[0])
        if target == "dim":
            return example.dim()
        return shape[args[0]] if args else shape

    def _operation(self, target: Any, args: Any, kwargs: Any, symbols: list[Symbol]) -> Symbol:
        if target in ADD | SUBTRACT | MULTIPLY | DIVIDE and len(args) == 2 and not kwargs:
            return self._arithmetic(target, args[0], args[1])
        if target in SIMPLE:
            return self._emit(SIMPLE[target](), (symbols[0],))
        if target in COPY:
            return Symbol(symbols[0].index, self._emit(None, (symbols[0],)).example, Memory())
        name = getattr(target, "__name__", target)
        if target in FUNCTIONS and args and isinstance(args[0], Symbol) and len(symbols) == 1:
            try:
                op = FUNCTIONS[target](args[0].example, *args[1:], **kwargs)
            except TypeError as error:
                raise UnsupportedError(f"no rule for these arguments of the operation '{name}': {error}") from error
            if target == "contiguous":
                args[0].memory.copied = True
            return self._emit(op, (args[0],), view=target is operator.getitem)
        raise UnsupportedError(f"no rule for the operation '{name}'. {ADVICE}")

    def _write(self, target: Symbol, result: Symbol) -> Symbol:
        """An in-place operation: `target` holds the result from now on, and views of its memory are out of date."""
        if result is target:  # the identity, such as dropout in eval mode
            return target
        if target.memory is self.given:
            raise UnsupportedError(f"the model writes into its input. {CLONE}")
        if target.memory.copied:
            raise UnsupportedError("an in-place operation on a tensor that .contiguous() may or may not have copied")
        for view in target.memory.values:
            view.stale = self.current
        target.index, target.example, target.stale = result.index, result.example, ""
        return target

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
        if isinstance(value, BatchSize):
            value.refuse()
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

    def _emit(self, op: Op | None, inputs: tuple[Symbol, ...], *, view: bool = False) -> Symbol:
        """Append an operation; `view` says that its result shares the memory of its input, as reshapes do."""
        for value in inputs:
            if value.stale:
                raise UnsupportedError(
                    f"uses a view of a tensor that '{value.stale}' changed in place; use the result of that layer, or "
                    "set inplace=False there"
                )
        if op is None:
            return inputs[0]
        if self.unroll and isinstance(op, ops.Reshape):
            op = self._in_memory_order(op, inputs[0].example)
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            example = evaluate(op, [s.example for s in inputs])
        self.nodes.append(Node(op, tuple(s.index for s in inputs), self.current, tuple(example.shape[1:])))
        view = view or isinstance(op, ops.Reshape | ops.Unroll)
        return Symbol(len(self.nodes) - 1, example, inputs[0].memory if view else Memory())

    def _in_memory_order(self, op: ops.Reshape, x: Tensor) -> Op:
        """Unroll, if it takes less to reorder the weights of the layers behind than three maps, there and back."""
        last = x.ndim == 4 and len(op.shape) == 1 and x.stride(1) == 1 < x.shape[1]
        dense = [user for user in self.users if isinstance(user, nn.Linear)]
        if not last or len(dense) < len(self.users) or sum(user.out_features for user in dense) > 2 * len(x):
            return op
        return ops.Unroll((x.shape[1], x.shape[2], x.shape[3]))
