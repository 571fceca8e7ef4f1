import pytest
import torch
from nets import Residual, settle, tiny_nets
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.errors import UnsupportedError


def test_the_graph_reproduces_the_network(net):
    model, shape = net
    x = torch.rand(6, *shape)
    graph = trace(model, x)
    assert torch.allclose(graph.forward(x), model(x), atol=1e-5)
    assert isinstance(graph.nodes[0].op, ops.Input)
    for node, value in zip(graph.nodes, graph.walk(x, lambda n, v: ops.evaluate(n.op, v)), strict=True):
        assert tuple(value.shape[1:]) == node.shape


def affine_nodes(model, shape):
    return [n for n in trace(model, torch.rand(1, *shape)).nodes if isinstance(n.op, ops.Affine)]


def test_affine_views_agree_with_the_materialised_matrix(net):
    """apply, apply_abs, transpose and bias_dot of every affine layer, against its matrix column by column."""
    model, shape = net
    graph = trace(model, torch.rand(1, *shape))
    for node in graph.nodes:
        if not isinstance(node.op, ops.Affine):
            continue
        op, in_shape = node.op, graph.nodes[node.inputs[0]].shape
        size = torch.Size(in_shape).numel()
        zero = op.apply(torch.zeros(1, *in_shape))
        matrix = (op.apply(torch.eye(size).view(size, *in_shape)) - zero).flatten(1).T  # (out, in)
        r, g = torch.rand(3, *in_shape), torch.randn(4, *node.shape)
        assert torch.allclose(op.apply_abs(r).flatten(1), r.flatten(1) @ matrix.abs().T, atol=1e-5)
        assert torch.allclose(op.transpose(g).flatten(1), g.flatten(1) @ matrix, atol=1e-5)
        dot = op.bias_dot(g)
        dot = torch.zeros(4) if dot is None else dot
        assert torch.allclose(dot, (g * zero).flatten(1).sum(1), atol=1e-5)
        assert op.bias_abs is None or bool((op.bias_abs + 1e-6 >= zero.abs()).all())
        assert (matrix != 0).sum(1).max() <= op.terms


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 3, 3))
        self.dense = nn.Parameter(torch.randn(3, 16))
        self.register_buffer("scale", torch.rand(1, 1, 1) + 0.5)

    def forward(self, x):
        x = -(2.0 - x) / self.scale * 3 + 1
        h = F.leaky_relu(F.conv2d(x, self.weight, stride=2), 0.2)
        h = F.dropout(F.max_pool2d(h, 2, 1), training=self.training)
        h = F.adaptive_avg_pool2d(F.avg_pool2d(h, 2, padding=1), (2, 2))
        h = torch.flatten(h.unsqueeze(1).squeeze(1), 1).contiguous()
        h = torch.atan(h).add(torch.sigmoid(h)).sub(0.1).mul(2.0)
        return F.linear(h.reshape(h.shape[0], 16), self.dense)


def test_functions_and_methods_are_understood():
    model = Functional().eval()
    x = torch.rand(3, 1, 9, 11)
    assert torch.allclose(trace(model, x).forward(x), model(x), atol=1e-5)


def test_the_graph_follows_the_parameters():
    model = settle(Residual())
    x = torch.rand(2, 2, 7, 5)
    graph = trace(model, x)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert torch.allclose(graph.forward(x), model(x), atol=1e-5)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


REFUSED = [
    (nn.Sequential(nn.Linear(4, 3), nn.GELU()), "layer '1': no rule for the layer type GELU"),
    (Lambda(lambda x: x * x), "a product or quotient of two values"),
    (Lambda(lambda x: 1 / x), "division by a value"),
    (Lambda(lambda x: x if x.sum() > 0 else -x), "cannot be traced"),
    (Lambda(lambda x: x.sort(1)), "no rule for the operation 'sort'"),
    (Lambda(lambda x: torch.cat([x, x], 0)), "batch axis"),
    (Lambda(lambda x: torch.cat([x, torch.ones(2, 1)], 1)), "constant"),
    (Lambda(lambda x: x.mean(0)), "batch axis"),
    (Lambda(lambda x: x.reshape(-1)), "batch axis"),
    (Lambda(lambda x: torch.ones(2, 3)), "does not depend"),
    (Lambda(lambda x: x + torch.ones(3, 1, 4)), "more axes"),
    (Lambda(lambda x: x + torch.arange(2.0)[:, None]), "differs between the inputs"),
    (nn.Sequential(nn.LeakyReLU(-0.5)), "negative_slope"),
    (nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 1, 2, padding="same")), "asymmetric"),
    (nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 1, 2, padding=1, padding_mode="circular")), "padding_mode"),
    (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "running statistics"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_has_no_rule_is_refused_by_name(model, message):
    with pytest.raises(UnsupportedError, match=message):
        trace(model.eval(), torch.rand(2, 4))


def test_a_model_that_tracing_misreads_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    model = Hidden().eval()
    model.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(UnsupportedError, match="forward hook"):
        trace(model, torch.rand(1, 4))


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_onnx_models_get_the_same_bounds(tmp_path):
    model, shape = tiny_nets()["residual"]
    x = torch.rand(3, *shape)
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model, (x[:1],), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, verbose=False
    )
    loaded = hf.load_model(path)
    for method in ("ibp", "crown"):
        ours, theirs = (hf.bounds(m, x, hf.Linf(0.05), method) for m in (loaded, model))
        assert torch.allclose(ours.lower, theirs.lower, atol=1e-5)
        assert torch.allclose(ours.upper, theirs.upper, atol=1e-5)


def test_weights_that_are_computed_keep_their_gradient_where_no_loss_looks_at_the_logits():
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2))
    graph, logits = trace_batch(model, torch.rand(4, 3), use_logits=False)
    assert not logits.requires_grad
    first = next(node.op for node in graph.nodes if isinstance(node.op, ops.Linear))
    (gradient,) = torch.autograd.grad(first.weight.square()[0, 1], layer.parametrizations.weight.original)
    assert float(gradient.abs().max()) > 0


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def test_a_parametrised_layer_with_a_forward_of_its_own_is_looked_into():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(Halved(3, 2))).eval()
    x = torch.rand(4, 3)
    assert torch.allclose(trace(model, x).forward(x), model(x))


class Shortcut(nn.Module):
    """A residual block whose shortcut is given: relu(conv(x) + shortcut(x)), batch norm by its function."""

    def __init__(self, shortcut):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.shortcut = nn.Conv2d(2, 6, 3, 2, 1), nn.Linear(6 * 4 * 3, 3), shortcut
        self.register_buffer("mean", torch.rand(6))
        self.register_buffer("var", torch.rand(6) + 0.5)

    def forward(self, x):
        h = F.batch_norm(self.conv(x), self.mean, self.var, eps=1e-3)
        return self.head(torch.relu(h + self.shortcut(x)).unflatten(0, (-1, 1)).squeeze(1).flatten(1))


def test_padding_and_slices_equal_the_convolution_that_does_the_same():
    """Shortcuts that take every second pixel and pad the channels with zeros, against a 1 x 1 convolution."""
    sliced = Shortcut(Lambda(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)))
    conv = nn.Conv2d(2, 6, 1, 2, bias=False)
    with torch.no_grad():
        conv.weight.zero_()[torch.tensor([2, 3]), torch.tensor([0, 1])] = 1.0
    x, y = torch.rand(2, 2, 7, 5), torch.tensor([0, 1])
    models = [sliced.eval(), Shortcut(conv).eval()]
    assert torch.allclose(trace(sliced, x).forward(x), models[1](x), atol=1e-6)
    for method in ("ibp", "crown"):
        ours, theirs = (hf.bounds(model, x, hf.Linf(0.05), method) for model in models)
        assert torch.allclose(ours.lower, theirs.lower, atol=1e-5)
        assert torch.allclose(ours.upper, theirs.upper, atol=1e-5)
    for method, threat in (("milp", hf.Linf(0.01)), ("bcp", hf.L2(0.01)), ("gloro", hf.L2(0.01))):
        ours, theirs = (hf.certify(model, x, y, threat, method).margin for model in models)
        assert torch.allclose(ours, theirs, atol=1e-4), method


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.batch_norm(x, None, None, training=True), "statistics of the batch"),
        (lambda x: F.pad(x, (1, 1), value=1.0), "only zeros"),
        (lambda x: F.pad(x, (1, 1), mode="circular"), "only zeros"),
        (lambda x: F.pad(x, (0, 0, 1, 0)), "only zeros"),
        (lambda x: x[0], "behind the whole batch"),
        (lambda x: x[:1], "behind the whole batch"),
        (lambda x: x[..., 0, :], "behind the whole batch"),
        (lambda x: x[:, [0, 1]], "behind the whole batch"),
    ],
)
def test_what_would_mix_the_inputs_of_a_batch_is_refused(function, message):
    with pytest.raises(UnsupportedError, match=f"layer '.*{message}"):
        trace(nn.Sequential(Lambda(function)).eval(), torch.rand(2, 4))
